"""SwiGLU experts over DeepGEMM's grouped products, in checkpoint form: nothing is derived from the tensors.

Rows that come in the places of their experts go straight into the masked product. Rows by token are copied there first, a few into fixed
places (masked), many into aligned segments (contiguous). How many places these need, the host learns from the dispatcher or from the device;
a captured step takes the most that there can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import torch
from crossdock.errors import DispatchMisuse
from crossdock.types.dispatch import ReceiveLayout, ScaleForm

from crossdock_models.experts.deep_gemm.capabilities import ALIGNMENT, deep_gemm_capabilities
from crossdock_models.experts.deep_gemm.kernels.activate import quantise_places, swiglu_places
from crossdock_models.experts.deep_gemm.kernels.move_rows import move_rows
from crossdock_models.experts.deep_gemm.kernels.places import (
    Places,
    fixed_places,
    given_places,
    segment_places,
    segments_needed,
)
from crossdock_models.experts.deep_gemm.kernels.sum_choices import sum_choices

if TYPE_CHECKING:
    from crossdock.types.dispatch import Received
    from crossdock.types.experts import ExpertsCapabilities, ExpertsSpec, ExpertTensors

    from crossdock_models.experts.deep_gemm.library import Products
    from crossdock_models.experts.deep_gemm.options import DeepGemmOptions


@attrs.frozen(kw_only=True, eq=False)
class _Matrix:
    """One projection of all experts."""

    weight: torch.Tensor
    """[S, n, k] bf16 or float8_e4m3fn."""
    scale: torch.Tensor | None
    """[S, n / 128, k / 128] float32 of float8 weights."""


class DeepGemmExperts:
    """Runs experts on rows in places, rows by token and replicated rows."""

    def __init__(self, options: DeepGemmOptions, spec: ExpertsSpec, products: Products) -> None:
        self._options = options
        self._spec = spec
        self._products = products
        self._is_fp8 = spec.weight_dtype == "fp8_block"
        self._row_dtype = torch.float8_e4m3fn if self._is_fp8 else torch.bfloat16
        self._layers: dict[int, tuple[_Matrix, _Matrix]] = {}
        self._all_sms = products.get_num_sms()

    @property
    def capabilities(self) -> ExpertsCapabilities:
        return deep_gemm_capabilities(fp8_weights=self._is_fp8)

    def attach(self, tensors: ExpertTensors) -> None:
        named = tensors.tensors
        self._layers[tensors.layer] = (
            _Matrix(weight=named["gate_up"], scale=named.get("gate_up_scale")),
            _Matrix(weight=named["down"], scale=named.get("down_scale")),
        )

    def refresh(self, layer: int, slots: Sequence[int]) -> None:
        """Nothing is derived from the tensors."""

    def run(self, layer: int, received: Received, sm_budget: int | None = None) -> torch.Tensor:
        self._products.set_num_sms(_even(sm_budget, self._all_sms))
        if received.layout is ReceiveLayout.EXPERT_MAJOR:
            return self._run_places(layer, received)
        return self._run_tokens(layer, received)

    def _run_places(self, layer: int, received: Received) -> torch.Tensor:
        """[S, C, H] in, [S, C, H] out; places beyond an expert's count are neither read nor written."""
        rows, counts = received.rows, received.counts
        num_experts, capacity, hidden_size = rows.shape
        if not isinstance(counts, torch.Tensor) or capacity % ALIGNMENT:
            raise DispatchMisuse(
                f"experts deep_gemm: expert_major rows need counts on the device and a capacity that is a multiple of {ALIGNMENT}, "
                f"found {type(counts).__name__} and {capacity}; hand them over so"
            )
        places = given_places(counts, capacity)
        flat, scales = rows.view(-1, hidden_size), received.scales
        if scales is not None and received.scale_form is not ScaleForm.FP32_COL_TMA:
            raise DispatchMisuse(
                f"experts deep_gemm: scales of expert_major rows come by column, found {received.scale_form}"
            )
        if self._is_fp8 and scales is None:
            flat, scales = quantise_places(flat, places)
        expected = received.expected_rows or capacity
        return self._two_products(layer, flat, scales, places, expected).view(num_experts, capacity, hidden_size)

    def _run_tokens(self, layer: int, received: Received) -> torch.Tensor:
        """[R, H] in, [R, H] out, weights applied."""
        rows, ids, weights = received.rows, received.local_topk_ids, received.row_weights
        if ids is None or weights is None:
            raise DispatchMisuse(f"experts deep_gemm: {received.layout.value} rows without local ids and weights")
        num_experts, num_rows = self._spec.num_local_experts, rows.shape[0]
        if num_rows == 0:
            return torch.empty(0, self._spec.hidden_size, dtype=torch.bfloat16, device=rows.device)
        if num_rows <= self._options.masked_rows:
            places = fixed_places(ids, num_experts, -(-num_rows // ALIGNMENT) * ALIGNMENT)
        else:
            most = segments_needed(ids.numel(), num_experts) if _is_captured(ids) else None
            places = segment_places(ids, num_experts, most if received.aligned_rows is None else received.aligned_rows)
        moved = move_rows(rows, received.scales, ids, places, self._row_dtype)
        expected = -(-ids.numel() // num_experts)
        out = self._two_products(layer, moved.rows, moved.scales, places, expected)
        return sum_choices(out, moved.positions, weights)

    def _two_products(
        self, layer: int, rows: torch.Tensor, scales: torch.Tensor | None, places: Places, expected: int
    ) -> torch.Tensor:
        """Placed rows [P, H] -> outputs in the same places, bf16."""
        gate_up, down = self._layers[layer]
        both = self._product(rows, scales, gate_up, places, expected)
        activated, scales = swiglu_places(both, places, self._row_dtype)
        return self._product(activated, scales, down, places, expected)

    def _product(
        self, rows: torch.Tensor, scales: torch.Tensor | None, matrix: _Matrix, places: Places, expected: int
    ) -> torch.Tensor:
        """[P, k] -> [P, n] bf16 in live places."""
        products, columns = self._products, matrix.weight.shape[1]
        out = torch.empty(places.num_places, columns, dtype=torch.bfloat16, device=rows.device)
        if places.num_places == 0:
            return out
        if places.groups is not None:
            if scales is None or matrix.scale is None:
                products.contiguous_bf16(rows, matrix.weight, out, places.groups)
            else:
                products.contiguous_fp8((rows, scales), (matrix.weight, matrix.scale), out, places.groups)
            return out
        by_expert = (-1, places.capacity)
        rows, out_by_expert = rows.unflatten(0, by_expert), out.unflatten(0, by_expert)
        if scales is None or matrix.scale is None:
            products.masked_bf16(rows, matrix.weight, out_by_expert, places.counts, expected)
        else:
            products.masked_fp8((rows, scales), (matrix.weight, matrix.scale), out_by_expert, places.counts, expected)
        return out


def _is_captured(tensor: torch.Tensor) -> bool:
    """Whether the current stream records a graph, in which nothing may wait for the device."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _even(sm_budget: int | None, all_sms: int) -> int:
    """Multiprocessors of a product: the library pairs them."""
    return all_sms if sm_budget is None else max(2, min(sm_budget, all_sms) // 2 * 2)
