# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""``grouped_swiglu``: rows through their local experts and back to one weighted row each, five launches (two for a few rows), no host synchronisation."""

from __future__ import annotations

import torch
from crossdock.ops.early_launch import early_launch

from crossdock_models.experts.triton.kernels.block_order import BlockOrder, block_order
from crossdock_models.experts.triton.kernels.few_rows import are_few, few_rows_swiglu
from crossdock_models.experts.triton.kernels.fp8_swiglu import fp8_swiglu
from crossdock_models.experts.triton.kernels.grouped_large import choose_large_tiles, large_down, large_gate_up
from crossdock_models.experts.triton.kernels.grouped_weights import GroupedWeights
from crossdock_models.experts.triton.kernels.hopper_products import Factor, hopper_products
from crossdock_models.experts.triton.kernels.sum_choices import sum_choices
from crossdock_models.experts.triton.kernels.tiles import MOST_MIDDLING_ROWS, Tiles, choose_tiles

FETCHED_LINES = 4
"""Lines of 128 bytes of each weight row that the second product asks for while the first one ends: 64 KiB a program."""


def grouped_swiglu(
    rows: torch.Tensor,
    local_ids: torch.Tensor,
    weights: torch.Tensor,
    experts: GroupedWeights,
    tiles: Tiles | None = None,
    sm_budget: int | None = None,
) -> torch.Tensor:
    """rows [R, H], local_ids [R, K] int64 (-1 = none), weights [R, K] float32 -> [R, H] in the dtype of rows.

    Row r of the result is the sum over its local choices, in the order of k, of weight * expert(row); zero without any. ``tiles`` instead
    of what the table says; ``sm_budget`` multiprocessors at most for both products, but not for rows that ``are_few``.
    """
    num_rows, top_k = local_ids.shape
    if num_rows == 0:
        return torch.empty_like(rows)
    rows, local_ids, weights = rows.contiguous(), local_ids.contiguous(), weights.contiguous()
    rows_per_expert = local_ids.numel() / experts.num_experts
    if tiles is None and experts.takes_fp8:
        return fp8_swiglu(rows, None, local_ids, weights, experts, sm_budget)
    if tiles is None and not experts.is_quantised and are_few(local_ids, experts.num_experts):
        return few_rows_swiglu(rows, local_ids, weights, experts.gate_up, experts.down)
    if tiles is None and experts.takes_hopper and rows_per_expert > MOST_MIDDLING_ROWS:
        gate_up, down = experts.factors
        parts, order = hopper_products(Factor(values=rows), local_ids, gate_up, down, rows.dtype, sm_budget)
        return sum_choices(parts, order, weights)
    if tiles is None and experts.takes_large(rows_per_expert):
        large = choose_large_tiles(rows_per_expert)
        order = block_order(local_ids, experts.num_experts, large.rows, large.halves)
        activated = large_gate_up(rows, top_k, order, experts.gate_up, large, sm_budget)
        parts = large_down(activated, order, experts.down, large, sm_budget)
        return sum_choices(parts, order, weights)
    tiles = tiles or choose_tiles(rows_per_expert, experts.down.element_size())
    order = block_order(local_ids, experts.num_experts, tiles.rows)
    activated = gate_up_rows(rows, top_k, order, experts, tiles, sm_budget)
    parts = down_rows(activated, order, experts, tiles, sm_budget)
    return sum_choices(parts, order, weights)


def gate_up_rows(
    rows: torch.Tensor,
    top_k: int,
    order: BlockOrder,
    experts: GroupedWeights,
    tiles: Tiles,
    sm_budget: int | None = None,
) -> torch.Tensor:
    """silu(gate) * up of every pair in its order: [blocks * tile rows, I]."""
    # Imported at the first call: CPU installations have no triton.
    import triton

    from crossdock_models.experts.triton.kernels.grouped_swiglu_triton import gate_up_kernel

    blocks, inner_size, hidden_size = order.block_experts.numel(), experts.inner_size, experts.hidden_size
    activated = torch.empty(blocks * tiles.rows, inner_size, dtype=rows.dtype, device=rows.device)
    gate_up = experts.gate_up
    scale = experts.gate_up_scale if experts.gate_up_scale is not None else gate_up
    programs = blocks * triton.cdiv(inner_size, tiles.gate_columns)
    gate_up_kernel[(programs if sm_budget is None else min(programs, sm_budget),)](
        rows,
        gate_up,
        scale,
        order.pairs,
        order.block_experts,
        order.num_blocks,
        activated,
        rows.shape[0] * top_k,
        hidden_size,
        inner_size,
        scale.shape[1],
        scale.shape[-1],
        top_k=top_k,
        block_rows=tiles.rows,
        block_columns=tiles.gate_columns,
        block_inner=tiles.inner,
        group=tiles.group,
        weight_blocks=experts.is_quantised,
        num_warps=tiles.gate_warps,
        num_stages=tiles.gate_stages,
        **early_launch(rows),
    )
    return activated


def down_rows(
    activated: torch.Tensor,
    order: BlockOrder,
    experts: GroupedWeights,
    tiles: Tiles,
    sm_budget: int | None = None,
) -> torch.Tensor:
    """Output of every pair in its order: [blocks * tile rows, H]; places without a pair stay unwritten."""
    # Imported at the first call: CPU installations have no triton.
    import triton

    from crossdock_models.experts.triton.kernels.grouped_swiglu_triton import down_kernel

    blocks, inner_size, hidden_size = order.block_experts.numel(), experts.inner_size, experts.hidden_size
    parts = torch.empty(order.pairs.numel(), hidden_size, dtype=activated.dtype, device=activated.device)
    scale = experts.down_scale if experts.down_scale is not None else experts.down
    programs = blocks * triton.cdiv(hidden_size, tiles.down_columns)
    down_kernel[(programs if sm_budget is None else min(programs, sm_budget),)](
        activated,
        experts.down,
        scale,
        order.pairs,
        order.block_experts,
        order.num_blocks,
        parts,
        order.places.numel(),
        hidden_size,
        inner_size,
        scale.shape[1],
        scale.shape[-1],
        block_rows=tiles.rows,
        block_columns=tiles.down_columns,
        block_inner=tiles.inner,
        group=tiles.group,
        weight_blocks=experts.is_quantised,
        fetched_lines=FETCHED_LINES,
        num_warps=tiles.down_warps,
        num_stages=tiles.down_stages,
        **early_launch(activated),
    )
    return parts
