# mypy: ignore-errors
"""Triton kernels of the two grouped products for many rows an expert: bound by arithmetic, so a program walks over tiles and never idles.

As ``grouped_swiglu_triton``, with weights through tensor descriptors (the bulk copy engine) and one program a multiprocessor. The loops over
tiles and over the summed dimension are flattened into one by the compiler: a tile's first loads are under way while the tile before is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl
from crossdock.ops.early_launch_triton import wait_for_inputs

from crossdock_models.experts.triton.kernels.grouped_swiglu_triton import tile_of


@triton.jit(do_not_specialize=["num_pairs"])
def large_gate_up_kernel(
    # pointers (gate_up: a descriptor over [S * 2, I, H])
    rows,
    gate_up,
    pairs,
    block_experts,
    num_blocks,
    out,
    # sizes
    num_pairs,
    hidden_size,
    inner_size,
    top_k,
    # meta
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_inner: tl.constexpr,
    group: tl.constexpr,
    is_early: tl.constexpr,
):
    """out[place] = silu(gate) * up in the order of ``pairs``. Rows of empty pairs are computed from row 0 and never read."""
    wait_for_inputs(is_early)
    num_row_blocks = tl.load(num_blocks)
    column_blocks = tl.cdiv(inner_size, block_columns)
    lane = tl.arange(0, block_rows)
    inner = tl.arange(0, block_inner)
    for tile in tl.range(tl.program_id(0), num_row_blocks * column_blocks, tl.num_programs(0), flatten=True):
        row_block, column_block = tile_of(tile, num_row_blocks, column_blocks, group)
        expert = tl.load(block_experts + row_block)
        pair = tl.load(pairs + row_block * block_rows + lane)
        row = (tl.where(pair < num_pairs, pair, 0) // top_k).to(tl.int64)
        row_at = rows + row[:, None] * hidden_size + inner[None, :]
        # A tile of gate and the one of up come together and are multiplied as one.
        both = tl.zeros((block_rows, 2 * block_columns), dtype=tl.float32)
        for start in range(0, hidden_size, block_inner):
            x = tl.load(row_at + start)
            weight = gate_up.load([2 * expert, column_block * block_columns, start])
            both = tl.dot(x, tl.reshape(weight, (2 * block_columns, block_inner)).T, both, input_precision="ieee")
        gate, up = tl.split(tl.permute(tl.reshape(both, (block_rows, 2, block_columns)), (0, 2, 1)))
        activated = gate / (1.0 + tl.exp(-gate)) * up
        place = (row_block * block_rows + lane).to(tl.int64)
        column = column_block * block_columns + tl.arange(0, block_columns)
        at = out + place[:, None] * inner_size + column[None, :]
        tl.store(at, activated.to(out.dtype.element_ty), mask=(column < inner_size)[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def large_down_kernel(
    # pointers (activated, down: descriptors over [places, I] and [S * H, I])
    activated,
    down,
    pairs,
    block_experts,
    num_blocks,
    weights,
    out,
    # sizes
    num_pairs,
    hidden_size,
    inner_size,
    # meta
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_inner: tl.constexpr,
    group: tl.constexpr,
    is_early: tl.constexpr,
):
    """out[pair] = weight * down(activated[place])."""
    wait_for_inputs(is_early)
    num_row_blocks = tl.load(num_blocks)
    column_blocks = tl.cdiv(hidden_size, block_columns)
    lane = tl.arange(0, block_rows)
    for tile in tl.range(tl.program_id(0), num_row_blocks * column_blocks, tl.num_programs(0), flatten=True):
        row_block, column_block = tile_of(tile, num_row_blocks, column_blocks, group)
        expert = tl.load(block_experts + row_block)
        total = tl.zeros((block_rows, block_columns), dtype=tl.float32)
        for start in range(0, inner_size, block_inner):
            x = activated.load([row_block * block_rows, start])
            total = tl.dot(
                x,
                down.load([expert * hidden_size + column_block * block_columns, start]).T,
                total,
                input_precision="ieee",
            )
        pair = tl.load(pairs + row_block * block_rows + lane)
        column = column_block * block_columns + tl.arange(0, block_columns)
        weight = tl.load(weights + pair, mask=pair < num_pairs, other=0.0)
        at = out + pair[:, None].to(tl.int64) * hidden_size + column[None, :]
        keep = (pair < num_pairs)[:, None] & (column < hidden_size)[None, :]
        tl.store(at, (total * weight[:, None]).to(out.dtype.element_ty), mask=keep)
