# mypy: ignore-errors
"""Triton kernels of the two grouped products for many rows an expert: bound by arithmetic, so a program walks over tiles and never idles.

As ``grouped_swiglu_triton``, with weights and results through tensor descriptors (the bulk copy engine) and one program a multiprocessor. The
loops over tiles and over the summed dimension are flattened into one by the compiler: a tile's first loads are under way while the tile before
is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl
from crossdock.ops.early_launch_triton import wait_for_inputs

from crossdock_models.experts.triton.kernels.grouped_swiglu_triton import tile_of


@triton.jit
def tiles_of(num_blocks, column_blocks, is_half: tl.constexpr):
    """(first tile, end, number of row blocks, blocks in front) of a program's walk over whole blocks or over those of half the rows.

    Tiles of half blocks are numbered behind the others: the walk goes on where it ended.
    """
    whole = tl.load(num_blocks + 1)
    first, end = tl.program_id(0), whole * column_blocks
    in_front, row_blocks = 0, whole
    if is_half:
        first += tl.cdiv(tl.maximum(end - first, 0), tl.num_programs(0)) * tl.num_programs(0)
        in_front, row_blocks = whole, tl.load(num_blocks) - whole
        end = tl.load(num_blocks) * column_blocks
    return first, end, row_blocks, in_front


@triton.jit
def walk_gate_up(
    rows,
    gate_up,
    pairs,
    block_experts,
    num_blocks,
    out,
    num_pairs,
    hidden_size,
    inner_size,
    top_k: tl.constexpr,
    block_rows: tl.constexpr,
    tile_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_inner: tl.constexpr,
    group: tl.constexpr,
) -> None:
    """Tiles of ``tile_rows`` rows, at the head of blocks of ``block_rows``."""
    column_blocks = tl.cdiv(inner_size, block_columns)
    first, end, num_row_blocks, in_front = tiles_of(num_blocks, column_blocks, tile_rows != block_rows)
    lane = tl.arange(0, tile_rows)
    inner = tl.arange(0, block_inner)
    for tile in tl.range(first, end, tl.num_programs(0), flatten=True):
        row_block, column_block = tile_of(tile - in_front * column_blocks, num_row_blocks, column_blocks, group)
        row_block += in_front
        expert = tl.load(block_experts + row_block)
        pair = tl.load(pairs + row_block * block_rows + lane)
        row = (tl.where(pair < num_pairs, pair, 0) // top_k).to(tl.int64)
        row_at = rows + row[:, None] * hidden_size + inner[None, :]
        # A tile of gate and the one of up come together and are multiplied as one.
        both = tl.zeros((tile_rows, 2 * block_columns), dtype=tl.float32)
        for start in range(0, hidden_size, block_inner):
            x = tl.load(row_at + start)
            weight = gate_up.load([2 * expert, column_block * block_columns, start])
            both = tl.dot(x, tl.reshape(weight, (2 * block_columns, block_inner)).T, both, input_precision="ieee")
        gate, up = tl.split(tl.permute(tl.reshape(both, (tile_rows, 2, block_columns)), (0, 2, 1)))
        activated = gate / (1.0 + tl.exp(-gate)) * up
        out.store([row_block * block_rows, column_block * block_columns], activated.to(out.dtype))


@triton.jit(do_not_specialize=["num_pairs"])
def large_gate_up_kernel(
    # pointers (gate_up, out, half_out: descriptors over [S * 2, I, H] and twice [places, I])
    rows,
    gate_up,
    pairs,
    block_experts,
    num_blocks,
    out,
    half_out,
    # sizes
    num_pairs,
    hidden_size,
    inner_size,
    # meta
    top_k: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_inner: tl.constexpr,
    group: tl.constexpr,
    halves: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    """out[place] = silu(gate) * up in the order of ``pairs``. Rows of empty pairs are computed from row 0 and never read."""
    wait_for_inputs(is_early)
    walk_gate_up(rows, gate_up, pairs, block_experts, num_blocks, out, num_pairs, hidden_size, inner_size, top_k,
                 block_rows, block_rows, block_columns, block_inner, group)  # fmt: skip
    if halves:
        walk_gate_up(rows, gate_up, pairs, block_experts, num_blocks, half_out, num_pairs, hidden_size, inner_size, top_k,
                     block_rows, block_rows // 2, block_columns, block_inner, group)  # fmt: skip


@triton.jit
def large_down_kernel(
    # pointers (activated, down, out: descriptors over [places, I], [S * H, I] and [places, H])
    activated,
    down,
    out,
    block_experts,
    num_blocks,
    # sizes
    hidden_size,
    inner_size,
    # meta
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_inner: tl.constexpr,
    group: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    """out[place] = down(activated[place]). Half blocks are taken for whole ones: here tiles of half the rows cost more than they spare."""
    wait_for_inputs(is_early)
    num_row_blocks = tl.load(num_blocks)
    column_blocks = tl.cdiv(hidden_size, block_columns)
    for tile in tl.range(tl.program_id(0), num_row_blocks * column_blocks, tl.num_programs(0), flatten=True):
        row_block, column_block = tile_of(tile, num_row_blocks, column_blocks, group)
        expert = tl.load(block_experts + row_block)
        total = tl.zeros((block_rows, block_columns), dtype=tl.float32)
        for start in range(0, inner_size, block_inner):
            x = activated.load([row_block * block_rows, start])
            weight = down.load([expert * hidden_size + column_block * block_columns, start])
            total = tl.dot(x, weight.T, total, input_precision="ieee")
        out.store([row_block * block_rows, column_block * block_columns], total.to(out.dtype))
