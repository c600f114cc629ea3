# mypy: ignore-errors
"""Triton kernels of the two grouped products in float8: rows and weights e4m3, one scale per 128 elements of a row and per 128 x 128 of a weight.

Each step along the summed dimension is one block of scales: its product is a sum of its own, which is scaled while it is added up. A program takes
two blocks of columns for every block of rows, so that one is multiplied while the other is added, and half as many rows are read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from crossdock.ops.early_launch_triton import wait_for_inputs
from crossdock.ops.quantise_rows_triton import block_scales

from crossdock_models.experts.triton.kernels.grouped_large_triton import tiles_of
from crossdock_models.experts.triton.kernels.grouped_swiglu_triton import tile_of


@triton.jit
def walk_fp8_gate_up(
    rows,
    row_scales,
    gate_up,
    weight_scales,
    pairs,
    block_experts,
    num_blocks,
    out,
    out_scales,
    num_pairs,
    hidden_size,
    inner_size,
    top_k: tl.constexpr,
    block_rows: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
) -> None:
    """Tiles of ``tile_rows`` rows, at the head of blocks of ``block_rows``."""
    column_blocks, num_steps = inner_size // block, hidden_size // block
    first, end, num_row_blocks, in_front = tiles_of(num_blocks, column_blocks, tile_rows != block_rows)
    lane = tl.arange(0, tile_rows)
    inner = tl.arange(0, block)
    for tile in tl.range(first, end, tl.num_programs(0), flatten=True):
        row_block, column_block = tile_of(tile - in_front * column_blocks, num_row_blocks, column_blocks, group)
        row_block += in_front
        expert = tl.load(block_experts + row_block)
        pair = tl.load(pairs + row_block * block_rows + lane)
        row = (tl.where(pair < num_pairs, pair, 0) // top_k).to(tl.int64)
        row_at = rows + row[:, None] * hidden_size + inner[None, :]
        row_scale_at = row_scales + row * num_steps
        gate_at = expert * 2 * column_blocks + column_block
        gate_scale_at = weight_scales + gate_at.to(tl.int64) * num_steps
        gate = tl.zeros((tile_rows, block), dtype=tl.float32)
        up = tl.zeros((tile_rows, block), dtype=tl.float32)
        for step in range(num_steps):
            x = tl.load(row_at + step * block)
            row_scale = tl.load(row_scale_at + step)
            gate_scale = tl.load(gate_scale_at + step)
            up_scale = tl.load(gate_scale_at + column_blocks * num_steps + step)
            gate_weight = gate_up.load([gate_at * block, step * block])
            up_weight = gate_up.load([gate_at * block + inner_size, step * block])
            gate += tl.dot(x, gate_weight.T) * (row_scale * gate_scale)[:, None]
            up += tl.dot(x, up_weight.T) * (row_scale * up_scale)[:, None]
        activated = gate / (1.0 + tl.exp(-gate)) * up
        # The tile's columns are one block of the next product's scales.
        found = block_scales(activated)
        place = row_block * block_rows + lane
        tl.store(out_scales + place.to(tl.int64) * column_blocks + column_block, found)
        out.store([row_block * block_rows, column_block * block], (activated / found[:, None]).to(out.dtype))


@triton.jit(do_not_specialize=["num_pairs"])
def fp8_gate_up_kernel(
    # pointers (gate_up, out, half_out: descriptors over [S * 2 * I, H] and twice [places, I])
    rows,
    row_scales,
    gate_up,
    weight_scales,
    pairs,
    block_experts,
    num_blocks,
    out,
    half_out,
    out_scales,
    # sizes
    num_pairs,
    hidden_size,
    inner_size,
    # meta
    top_k: tl.constexpr,
    block_rows: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
    halves: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    """out[place], out_scales[place] = quantised silu(gate) * up in the order of ``pairs``. Rows of empty pairs are computed from row 0 and never read."""
    wait_for_inputs(is_early)
    walk_fp8_gate_up(rows, row_scales, gate_up, weight_scales, pairs, block_experts, num_blocks, out, out_scales, num_pairs,
                     hidden_size, inner_size, top_k, block_rows, block_rows, block, group)  # fmt: skip
    if halves:
        walk_fp8_gate_up(rows, row_scales, gate_up, weight_scales, pairs, block_experts, num_blocks, half_out, out_scales,
                         num_pairs, hidden_size, inner_size, top_k, block_rows, block_rows // 2, block, group)  # fmt: skip


@triton.jit
def fp8_down_kernel(
    # pointers (activated, down, out: descriptors over [places, I], [S * H, I] and [places, H])
    activated,
    row_scales,
    down,
    weight_scales,
    block_experts,
    num_blocks,
    out,
    # sizes
    hidden_size,
    inner_size,
    # meta
    block_rows: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    """out[place] = down(activated[place]), two blocks of columns a tile; what the second takes from past the last column is not stored."""
    wait_for_inputs(is_early)
    num_row_blocks = tl.load(num_blocks)
    scale_rows, num_steps = hidden_size // block, inner_size // block
    column_pairs = tl.cdiv(scale_rows, 2)
    lane = tl.arange(0, block_rows)
    for tile in tl.range(tl.program_id(0), num_row_blocks * column_pairs, tl.num_programs(0), flatten=True):
        row_block, column_pair = tile_of(tile, num_row_blocks, column_pairs, group)
        expert = tl.load(block_experts + row_block)
        row_scale_at = row_scales + (row_block * block_rows + lane).to(tl.int64) * num_steps
        first_at = expert * scale_rows + column_pair * 2
        scale_at = weight_scales + first_at.to(tl.int64) * num_steps
        second_scales = tl.where(column_pair * 2 + 1 < scale_rows, num_steps, 0)
        first = tl.zeros((block_rows, block), dtype=tl.float32)
        second = tl.zeros((block_rows, block), dtype=tl.float32)
        for step in range(num_steps):
            x = activated.load([row_block * block_rows, step * block])
            row_scale = tl.load(row_scale_at + step)
            first_scale = tl.load(scale_at + step)
            second_scale = tl.load(scale_at + second_scales + step)
            first_weight = down.load([first_at * block, step * block])
            second_weight = down.load([first_at * block + block, step * block])
            first += tl.dot(x, first_weight.T) * (row_scale * first_scale)[:, None]
            second += tl.dot(x, second_weight.T) * (row_scale * second_scale)[:, None]
        out.store([row_block * block_rows, column_pair * 2 * block], first.to(out.dtype))
        out.store([row_block * block_rows, column_pair * 2 * block + block], second.to(out.dtype))
