"""The two grouped products with rows and weights in float8; see ``grouped_swiglu``."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from crossdock.ops.early_launch import early_launch
from crossdock.ops.fp8_block_torch import BLOCK

from crossdock_models.experts.triton.kernels.block_order import BlockOrder
from crossdock_models.experts.triton.kernels.grouped_large import described, programs_of


@attrs.frozen(kw_only=True)
class Fp8Tiles:
    """Rows of a tile; its columns and the step along the summed dimension are blocks of scales."""

    rows: int
    gate_warps: int
    gate_stages: int
    down_warps: int
    down_stages: int
    group: int = 4
    halves: bool = False
    """Last blocks of at most half the rows cost half in the first product; only for 64 rows and more."""
    programs: int = 1
    """A multiprocessor."""

    @property
    def are_few(self) -> bool:
        """Weights are the left operand."""
        return self.rows < 64


FEW_FP8 = Fp8Tiles(rows=16, gate_warps=4, gate_stages=3, down_warps=4, down_stages=5, group=1, programs=2)
MANY_FP8 = Fp8Tiles(rows=64, gate_warps=8, gate_stages=5, down_warps=8, down_stages=4)
LARGE_FP8 = Fp8Tiles(rows=128, gate_warps=8, gate_stages=4, down_warps=16, down_stages=3, halves=True)
"""The best of ``tests/benchmarks/gpu/fp8_experts.py`` on an H200; nothing is tuned at start."""


def choose_fp8_tiles(rows_per_expert: float) -> Fp8Tiles:
    """The entry for the mean number of rows an expert gets."""
    if rows_per_expert <= 12:
        return FEW_FP8
    return MANY_FP8 if rows_per_expert <= 96 else LARGE_FP8


def fp8_gate_up(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    top_k: int,
    order: BlockOrder,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    tiles: Fp8Tiles,
    sm_budget: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate) * up of every pair in its order, quantised again: [places, I] float8_e4m3fn and [places, I / 128] float32.

    rows [R, H] float8_e4m3fn with row_scales [R, H / 128] float32; gate_up [S, 2I, H] with its scales, all contiguous; H and I multiples of 128.
    Half blocks of ``order`` leave their second half unwritten.
    """
    # Imported at the first call: CPU installations have no triton.
    from crossdock_models.experts.triton.kernels.fp8_few_triton import few_fp8_gate_up_kernel
    from crossdock_models.experts.triton.kernels.fp8_products_triton import fp8_gate_up_kernel

    hidden_size, inner_size = gate_up.shape[2], gate_up.shape[1] // 2
    out = torch.empty(order.pairs.numel(), inner_size, dtype=rows.dtype, device=rows.device)
    out_scales = torch.empty(out.shape[0], inner_size // BLOCK, dtype=torch.float32, device=rows.device)
    weights = described(gate_up.view(-1, hidden_size), BLOCK, BLOCK)
    inputs = (rows, row_scales, weights, gate_up_scale, order.pairs, order.block_experts, order.num_blocks)
    sizes = (rows.shape[0] * top_k, hidden_size, inner_size)
    grid = (programs_of(rows, sm_budget) * tiles.programs,)
    meta = _meta(rows, tiles, tiles.gate_warps, tiles.gate_stages)
    launch: Any = few_fp8_gate_up_kernel if tiles.are_few else fp8_gate_up_kernel
    if tiles.are_few:
        launch[grid](*inputs, out, out_scales, *sizes, top_k=top_k, **meta)
        return out, out_scales
    outs = (described(out, tiles.rows, BLOCK), described(out, tiles.rows // 2, BLOCK))
    launch[grid](*inputs, *outs, out_scales, *sizes, top_k=top_k, halves=tiles.halves, **meta)
    return out, out_scales


def fp8_down(
    activated: torch.Tensor,
    row_scales: torch.Tensor,
    order: BlockOrder,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    tiles: Fp8Tiles,
    dtype: torch.dtype,
    sm_budget: int | None,
) -> torch.Tensor:
    """Output of every pair in its order: [places, H] in ``dtype``; activated and its scales of ``fp8_gate_up``, down [S, H, I] with its scales."""
    # Imported at the first call: CPU installations have no triton.
    from crossdock_models.experts.triton.kernels.fp8_few_triton import few_fp8_down_kernel
    from crossdock_models.experts.triton.kernels.fp8_products_triton import fp8_down_kernel

    hidden_size, inner_size = down.shape[1], down.shape[2]
    out = torch.empty(order.pairs.numel(), hidden_size, dtype=dtype, device=activated.device)
    grid = (programs_of(activated, sm_budget) * tiles.programs,)
    weights = described(down.view(-1, inner_size), BLOCK, BLOCK)
    inputs = (row_scales, weights, down_scale, order.block_experts, order.num_blocks)
    meta = _meta(activated, tiles, tiles.down_warps, tiles.down_stages)
    launch: Any = few_fp8_down_kernel if tiles.are_few else fp8_down_kernel
    if tiles.are_few:
        launch[grid](activated, *inputs, out, hidden_size, inner_size, **meta)
        return out
    left, target = described(activated, tiles.rows, BLOCK), described(out, tiles.rows, BLOCK)
    launch[grid](left, *inputs, target, hidden_size, inner_size, **meta)
    return out


def _meta(tensor: torch.Tensor, tiles: Fp8Tiles, warps: int, stages: int) -> dict[str, Any]:
    """What all four kernels are compiled for."""
    return {
        "block_rows": tiles.rows,
        "block": BLOCK,
        "group": tiles.group,
        "num_warps": warps,
        "num_stages": stages,
        **early_launch(tensor),
    }
