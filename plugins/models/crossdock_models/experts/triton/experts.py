"""Experts whose weights stay in checkpoint form: the kernels read ``ExpertTensors`` in place, so there is nothing to refresh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from crossdock.errors import DispatchMisuse
from crossdock.types.dispatch import ScaleForm

from crossdock_models.experts.triton.capabilities import triton_capabilities
from crossdock_models.experts.triton.kernels.fp8_products_torch import dequantised_rows
from crossdock_models.experts.triton.kernels.fp8_swiglu import fp8_swiglu
from crossdock_models.experts.triton.kernels.grouped_swiglu import grouped_swiglu
from crossdock_models.experts.triton.kernels.grouped_weights import GroupedWeights

if TYPE_CHECKING:
    from crossdock.types.dispatch import Received
    from crossdock.types.experts import ExpertsCapabilities, ExpertsSpec, ExpertTensors


class TritonExperts:
    """Runs SwiGLU experts on ``token_rows`` and ``replicated`` rows, captured or eager."""

    def __init__(self, spec: ExpertsSpec) -> None:
        self._dtype = spec.dtype
        self._capabilities = triton_capabilities(spec.weight_dtype, spec.hidden_size, spec.intermediate_size)
        self._weights: dict[int, GroupedWeights] = {}

    @property
    def capabilities(self) -> ExpertsCapabilities:
        return self._capabilities

    def attach(self, tensors: ExpertTensors) -> None:
        named = tensors.tensors
        self._weights[tensors.layer] = GroupedWeights(
            gate_up=named["gate_up"],
            down=named["down"],
            gate_up_scale=named.get("gate_up_scale"),
            down_scale=named.get("down_scale"),
        )

    def refresh(self, layer: int, slots: Sequence[int]) -> None:
        """Nothing is derived from the tensors."""

    def run(self, layer: int, received: Received, sm_budget: int | None = None) -> torch.Tensor:
        ids, weights = received.local_topk_ids, received.row_weights
        if ids is None or weights is None:
            raise DispatchMisuse(f"experts triton: {received.layout.value} rows without local ids and weights")
        experts, rows = self._weights[layer], received.rows
        if received.scales is None:
            return grouped_swiglu(rows, ids, weights, experts, sm_budget=sm_budget)
        if received.scale_form is not ScaleForm.FP32_ROW:
            raise DispatchMisuse(
                f"experts triton: scales of rows by token come row by row, found {received.scale_form}"
            )
        scales = received.scales.contiguous()
        if not experts.takes_fp8:
            plain = dequantised_rows(rows, scales).to(self._dtype)
            return grouped_swiglu(plain, ids, weights, experts, sm_budget=sm_budget)
        if rows.shape[0] == 0:
            return torch.empty(rows.shape, dtype=torch.bfloat16, device=rows.device)
        return fp8_swiglu(rows.contiguous(), scales, ids.contiguous(), weights.contiguous(), experts, sm_budget)
