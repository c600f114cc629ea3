# mypy: ignore-errors
"""Triton kernels of the two grouped products in float8 for a few rows an expert: as ``fp8_products_triton``, but turned around.

Weights are the left operand, which tensor cores take by 64 rows at least, and straight from shared memory; the rows are the right one, of which they take
any multiple of 8. So weights stream through once without passing registers, whatever the number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from crossdock.ops.early_launch_triton import wait_for_inputs
from crossdock.ops.quantise_rows_triton import FLOOR, LARGEST

from crossdock_models.experts.triton.kernels.grouped_swiglu_triton import tile_of


@triton.jit(do_not_specialize=["num_pairs"])
def few_fp8_gate_up_kernel(
    # pointers (gate_up: a descriptor over [S * 2 * I, H])
    rows,
    row_scales,
    gate_up,
    weight_scales,
    pairs,
    block_experts,
    num_blocks,
    out,
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
    is_early: tl.constexpr,
) -> None:
    """out[place], out_scales[place] = quantised silu(gate) * up in the order of ``pairs``. Rows of empty pairs are computed from row 0 and never read."""
    wait_for_inputs(is_early)
    column_blocks, num_steps = inner_size // block, hidden_size // block
    num_row_blocks = tl.load(num_blocks)
    lane, inner = tl.arange(0, block_rows), tl.arange(0, block)
    for tile in tl.range(tl.program_id(0), num_row_blocks * column_blocks, tl.num_programs(0), flatten=True):
        row_block, column_block = tile_of(tile, num_row_blocks, column_blocks, group)
        expert = tl.load(block_experts + row_block)
        pair = tl.load(pairs + row_block * block_rows + lane)
        row = (tl.where(pair < num_pairs, pair, 0) // top_k).to(tl.int64)
        row_at = rows + row[None, :] * hidden_size + inner[:, None]
        row_scale_at = row_scales + row * num_steps
        gate_at = expert * 2 * column_blocks + column_block
        gate_scale_at = weight_scales + gate_at.to(tl.int64) * num_steps
        gate = tl.zeros((block, block_rows), dtype=tl.float32)
        up = tl.zeros((block, block_rows), dtype=tl.float32)
        for step in range(num_steps):
            x = tl.load(row_at + step * block)
            row_scale = tl.load(row_scale_at + step)
            gate_scale = tl.load(gate_scale_at + step)
            up_scale = tl.load(gate_scale_at + column_blocks * num_steps + step)
            gate_weight = gate_up.load([gate_at * block, step * block])
            up_weight = gate_up.load([gate_at * block + inner_size, step * block])
            gate += tl.dot(gate_weight, x) * (row_scale * gate_scale)[None, :]
            up += tl.dot(up_weight, x) * (row_scale * up_scale)[None, :]
        activated = gate / (1.0 + tl.exp(-gate)) * up
        # The tile's columns are one block of the next product's scales.
        found = tl.maximum(tl.max(tl.abs(activated), axis=0), FLOOR) / LARGEST
        place = (row_block * block_rows + lane).to(tl.int64)
        tl.store(out_scales + place * column_blocks + column_block, found)
        at = out + place[None, :] * inner_size + column_block * block + inner[:, None]
        tl.store(at, (activated / found[None, :]).to(out.dtype.element_ty))


@triton.jit
def few_fp8_down_kernel(
    # pointers (down: a descriptor over [S * H, I])
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
    """out[place] = down(activated[place])."""
    wait_for_inputs(is_early)
    num_row_blocks = tl.load(num_blocks)
    column_blocks, num_steps = hidden_size // block, inner_size // block
    lane, inner = tl.arange(0, block_rows), tl.arange(0, block)
    for tile in tl.range(tl.program_id(0), num_row_blocks * column_blocks, tl.num_programs(0), flatten=True):
        row_block, column_block = tile_of(tile, num_row_blocks, column_blocks, group)
        expert = tl.load(block_experts + row_block)
        place = (row_block * block_rows + lane).to(tl.int64)
        row_at = activated + place[None, :] * inner_size + inner[:, None]
        row_scale_at = row_scales + place * num_steps
        weight_at = expert * column_blocks + column_block
        scale_at = weight_scales + weight_at.to(tl.int64) * num_steps
        total = tl.zeros((block, block_rows), dtype=tl.float32)
        for step in range(num_steps):
            x = tl.load(row_at + step * block)
            scale = tl.load(row_scale_at + step) * tl.load(scale_at + step)
            weight = down.load([weight_at * block, step * block])
            total += tl.dot(weight, x) * scale[None, :]
        at = out + place[None, :] * hidden_size + column_block * block + inner[:, None]
        tl.store(at, total.to(out.dtype.element_ty))
