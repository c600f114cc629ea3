# mypy: ignore-errors
"""Triton kernels of the two grouped products, gate and up with SwiGLU and down, and of the weighted sum over a row's choices.

A block of rows belongs to one expert (``block_order``). Programs of the same column tile run next to one another over the blocks of
an expert, so that a weight tile is fetched once from memory and then found in L2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from crossdock.ops.early_launch_triton import fetch_rows, wait_for_inputs


@triton.jit
def tile_of(program, num_row_blocks, num_column_blocks, group: tl.constexpr):
    """Row and column block of a program: column blocks advance inside groups of ``group`` row blocks."""
    in_group = group * num_column_blocks
    first = (program // in_group) * group
    size = tl.minimum(num_row_blocks - first, group)
    return first + (program % in_group) % size, (program % in_group) // size


@triton.jit(do_not_specialize=["num_pairs"])
def gate_up_kernel(
    # pointers
    rows,
    gate_up,
    scales,
    pairs,
    block_experts,
    num_blocks,
    out,
    # sizes
    num_pairs,
    hidden_size,
    inner_size,
    scale_rows,
    scale_columns,
    # meta
    top_k: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_inner: tl.constexpr,
    group: tl.constexpr,
    weight_blocks: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    wait_for_inputs(is_early)
    column_blocks = tl.cdiv(inner_size, block_columns)
    num_row_blocks = tl.load(num_blocks)
    for tile in range(tl.program_id(0), num_row_blocks * column_blocks, tl.num_programs(0)):
        row_block, column_block = tile_of(tile, num_row_blocks, column_blocks, group)
        expert = tl.load(block_experts + row_block)
        lane = tl.arange(0, block_rows)
        pair = tl.load(pairs + row_block * block_rows + lane)
        row = (tl.where(pair < num_pairs, pair, 0) // top_k).to(tl.int64)
        column = column_block * block_columns + tl.arange(0, block_columns)
        inner = tl.arange(0, block_inner)
        column_inside = column < inner_size
        row_at = rows + row[:, None] * hidden_size + inner[None, :]
        gate = tl.zeros((block_rows, block_columns), dtype=tl.float32)
        up = tl.zeros((block_rows, block_columns), dtype=tl.float32)
        weight = gate_up + expert.to(tl.int64) * 2 * inner_size * hidden_size
        gate_at = weight + column[None, :].to(tl.int64) * hidden_size + inner[:, None]
        up_at = gate_at + inner_size.to(tl.int64) * hidden_size
        for start in range(0, hidden_size, block_inner):
            inside = start + inner < hidden_size
            x = tl.load(row_at + start, mask=(pair < num_pairs)[:, None] & inside[None, :], other=0.0)
            mask = inside[:, None] & column_inside[None, :]
            gate_tile = tl.load(gate_at + start, mask=mask, other=0.0)
            up_tile = tl.load(up_at + start, mask=mask, other=0.0)
            if weight_blocks:
                # fp8 weights with one scale per 128 x 128: the tile lies inside one block of inner elements.
                scale_at = scales + expert.to(tl.int64) * scale_rows * scale_columns + start // 128
                block_at = column // 128 * scale_columns
                gate_scale = tl.load(scale_at + block_at, mask=column_inside, other=0.0)
                scale_at += scale_rows // 2 * scale_columns
                up_scale = tl.load(scale_at + block_at, mask=column_inside, other=0.0)
                gate += tl.dot(x, gate_tile.to(x.dtype), input_precision="ieee") * gate_scale[None, :]
                up += tl.dot(x, up_tile.to(x.dtype), input_precision="ieee") * up_scale[None, :]
            else:
                gate = tl.dot(x, gate_tile, gate, input_precision="ieee")
                up = tl.dot(x, up_tile, up, input_precision="ieee")
        activated = gate / (1.0 + tl.exp(-gate)) * up
        place = (row_block * block_rows + lane).to(tl.int64)
        at = out + place[:, None] * inner_size + column[None, :]
        tl.store(at, activated.to(out.dtype.element_ty), mask=column_inside[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def down_kernel(
    # pointers
    activated,
    down,
    scales,
    pairs,
    block_experts,
    num_blocks,
    out,
    # sizes
    num_pairs,
    hidden_size,
    inner_size,
    scale_rows,
    scale_columns,
    # meta
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_inner: tl.constexpr,
    group: tl.constexpr,
    weight_blocks: tl.constexpr,
    fetched_lines: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    """out[place] = down(activated[place]); places without a pair stay unwritten."""
    column_blocks = tl.cdiv(hidden_size, block_columns)
    if is_early and fetched_lines > 0:
        # Blocks were ordered before the launch in front of this one: while its last programs run, weights can be on the way already.
        num_row_blocks = tl.load(num_blocks)
        if tl.program_id(0) < num_row_blocks * column_blocks:
            row_block, column_block = tile_of(tl.program_id(0), num_row_blocks, column_blocks, group)
            column = tl.minimum(column_block * block_columns + tl.arange(0, block_columns), hidden_size - 1)
            matrix_row = tl.load(block_experts + row_block).to(tl.int64) * hidden_size + column
            fetch_rows(down, matrix_row, inner_size, fetched_lines)
    wait_for_inputs(is_early)
    num_row_blocks = tl.load(num_blocks)
    for tile in range(tl.program_id(0), num_row_blocks * column_blocks, tl.num_programs(0)):
        row_block, column_block = tile_of(tile, num_row_blocks, column_blocks, group)
        expert = tl.load(block_experts + row_block)
        lane = tl.arange(0, block_rows)
        pair = tl.load(pairs + row_block * block_rows + lane)
        column = column_block * block_columns + tl.arange(0, block_columns)
        column_inside = column < hidden_size
        inner = tl.arange(0, block_inner)
        total = tl.zeros((block_rows, block_columns), dtype=tl.float32)
        weight_at = down + expert.to(tl.int64) * hidden_size * inner_size
        weight_at = weight_at + column[None, :].to(tl.int64) * inner_size + inner[:, None]
        place = (row_block * block_rows + lane).to(tl.int64)
        row_at = activated + place[:, None] * inner_size + inner[None, :]
        for start in range(0, inner_size, block_inner):
            inside = start + inner < inner_size
            x = tl.load(row_at + start, mask=inside[None, :], other=0.0)
            weight = tl.load(weight_at + start, mask=inside[:, None] & column_inside[None, :], other=0.0)
            if weight_blocks:
                scale_at = scales + expert.to(tl.int64) * scale_rows * scale_columns + start // 128
                scale = tl.load(scale_at + column // 128 * scale_columns, mask=column_inside, other=0.0)
                total += tl.dot(x, weight.to(x.dtype), input_precision="ieee") * scale[None, :]
            else:
                total = tl.dot(x, weight, total, input_precision="ieee")
        at = out + place[:, None] * hidden_size + column[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=(pair < num_pairs)[:, None] & column_inside[None, :])


@triton.jit
def sum_choices_kernel(
    # pointers
    parts,
    places,
    weights,
    out,
    # sizes
    hidden_size,
    # meta
    top_k: tl.constexpr,
    block: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    """out[r] = sum over k, ascending, of weight * part of the choices that are here; accumulates in float32."""
    wait_for_inputs(is_early)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros((block,), dtype=tl.float32)
    for k in tl.static_range(top_k):
        place = tl.load(places + row * top_k + k).to(tl.int64)
        weight = tl.load(weights + row * top_k + k)
        here = tl.where(place >= 0, hidden_size, 0)
        part = tl.load(parts + place * hidden_size + column, mask=column < here, other=0.0)
        total += weight * part.to(tl.float32)
    tl.store(out + row * hidden_size + column, total.to(out.dtype.element_ty), mask=column < hidden_size)
