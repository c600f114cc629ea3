"""``fp8_swiglu``: experts with float8 weights on float8 rows."""

from __future__ import annotations

import torch
from crossdock.ops.quantise_rows import quantise_rows

from crossdock_models.experts.triton.kernels.block_order import block_order
from crossdock_models.experts.triton.kernels.fp8_products import choose_fp8_tiles, fp8_down, fp8_gate_up
from crossdock_models.experts.triton.kernels.grouped_weights import GroupedWeights
from crossdock_models.experts.triton.kernels.hopper_products import Factor, hopper_products
from crossdock_models.experts.triton.kernels.sum_choices import sum_choices
from crossdock_models.experts.triton.kernels.tiles import MOST_MIDDLING_ROWS


def fp8_swiglu(
    rows: torch.Tensor,
    row_scales: torch.Tensor | None,
    local_ids: torch.Tensor,
    weights: torch.Tensor,
    experts: GroupedWeights,
    sm_budget: int | None = None,
) -> torch.Tensor:
    """As ``grouped_swiglu`` for weights that ``takes_fp8``, all inputs contiguous.

    rows [R, H] float8_e4m3fn with row_scales [R, H / 128] float32, for a result in bf16; or in another dtype without scales, for one in that dtype: they are
    quantised here. What lies between the products is quantised too.
    """
    dtype = torch.bfloat16
    if row_scales is None:
        dtype = rows.dtype
        rows, row_scales = quantise_rows(rows)
    gate_up_scale, down_scale = experts.gate_up_scale, experts.down_scale
    assert gate_up_scale is not None, "float8 weights have scales"
    assert down_scale is not None, "float8 weights have scales"
    rows_per_expert = local_ids.numel() / experts.num_experts
    if experts.takes_hopper and rows_per_expert > MOST_MIDDLING_ROWS and dtype.itemsize == 2:
        left = Factor(values=rows, scales=row_scales)
        parts, order = hopper_products(left, local_ids, *experts.factors, dtype, sm_budget)
        return sum_choices(parts, order, weights)
    tiles = choose_fp8_tiles(rows_per_expert)
    order = block_order(local_ids, experts.num_experts, tiles.rows, tiles.halves)
    activated = fp8_gate_up(
        rows, row_scales, local_ids.shape[1], order, experts.gate_up, gate_up_scale, tiles, sm_budget
    )
    parts = fp8_down(*activated, order, experts.down, down_scale, tiles, dtype, sm_budget)
    return sum_choices(parts, order, weights)
