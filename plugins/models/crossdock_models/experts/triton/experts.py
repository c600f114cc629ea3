"""Experts whose weights stay in checkpoint form: the kernels read ``ExpertTensors`` in place, so there is nothing to refresh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from crossdock.errors import DispatchMisuse

from crossdock_models.experts.triton.capabilities import TRITON_EXPERTS_CAPABILITIES
from crossdock_models.experts.triton.kernels.grouped_swiglu import grouped_swiglu
from crossdock_models.experts.triton.kernels.grouped_weights import GroupedWeights

if TYPE_CHECKING:
    from crossdock.types.dispatch import Received
    from crossdock.types.experts import ExpertsCapabilities, ExpertTensors


class TritonExperts:
    """Runs SwiGLU experts on ``token_rows`` and ``replicated`` rows, captured or eager."""

    def __init__(self) -> None:
        self._weights: dict[int, GroupedWeights] = {}

    @property
    def capabilities(self) -> ExpertsCapabilities:
        return TRITON_EXPERTS_CAPABILITIES

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
        return grouped_swiglu(received.rows, ids, weights, self._weights[layer], sm_budget=sm_budget)
