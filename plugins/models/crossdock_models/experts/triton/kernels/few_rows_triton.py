# mypy: ignore-errors
"""Triton kernels of experts for a handful of rows: every (row, choice) pair streams its expert's matrices once, nothing is sorted."""

from __future__ import annotations

import triton
import triton.language as tl
from crossdock.ops.early_launch_triton import fetch_rows, wait_for_inputs


@triton.jit
def few_gate_up_kernel(
    # pointers
    rows,
    gate_up,
    local_ids,
    out,
    # sizes
    hidden_size,
    inner_size,
    top_k,
    # meta
    block_columns: tl.constexpr,
    block_inner: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    """out[pair] = silu(gate) * up for ``block_columns`` columns; pairs that stay elsewhere are left unwritten."""
    wait_for_inputs(is_early)
    pair = tl.program_id(1)
    expert = tl.load(local_ids + pair)
    if expert >= 0:
        column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
        inner = tl.arange(0, block_inner)
        column_inside = column < inner_size
        row_at = rows + (pair // top_k).to(tl.int64) * hidden_size + inner
        gate_at = gate_up + (expert * 2 * inner_size + column[:, None]) * hidden_size + inner[None, :]
        up_at = gate_at + inner_size.to(tl.int64) * hidden_size
        gate = tl.zeros((block_columns, block_inner), dtype=tl.float32)
        up = tl.zeros((block_columns, block_inner), dtype=tl.float32)
        for start in range(0, hidden_size, block_inner):
            inside = start + inner < hidden_size
            mask = column_inside[:, None] & inside[None, :]
            gate_tile = tl.load(gate_at + start, mask=mask, other=0.0)
            up_tile = tl.load(up_at + start, mask=mask, other=0.0)
            x = tl.load(row_at + start, mask=inside, other=0.0).to(tl.float32)[None, :]
            gate += gate_tile.to(tl.float32) * x
            up += up_tile.to(tl.float32) * x
        gate_sum, up_sum = tl.sum(gate, axis=1), tl.sum(up, axis=1)
        activated = gate_sum / (1.0 + tl.exp(-gate_sum)) * up_sum
        tl.store(out + pair.to(tl.int64) * inner_size + column, activated.to(out.dtype.element_ty), mask=column_inside)


@triton.jit
def few_down_kernel(
    # pointers
    activated,
    down,
    local_ids,
    weights,
    out,
    # sizes
    hidden_size,
    inner_size,
    # meta
    top_k: tl.constexpr,
    block_columns: tl.constexpr,
    block_inner: tl.constexpr,
    num_lines: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    """out[row] = sum over k, ascending, of weight * down(activated[row, k]) for ``block_columns`` columns."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    inner = tl.arange(0, block_inner)
    column_inside = column < hidden_size
    if is_early:
        # The choices were made before the launch in front of this one: their matrices can be on the way already.
        for k in tl.static_range(top_k):
            expert = tl.maximum(tl.load(local_ids + row * top_k + k), 0)
            fetch_rows(down, expert * hidden_size + tl.minimum(column, hidden_size - 1), inner_size, num_lines)
    wait_for_inputs(is_early)
    total = tl.zeros((block_columns, block_inner), dtype=tl.float32)
    for k in tl.static_range(top_k):
        expert = tl.load(local_ids + row * top_k + k)
        # A choice elsewhere reads nothing: no element is inside.
        width = tl.where(expert >= 0, inner_size, 0)
        weight = tl.load(weights + row * top_k + k)
        tile_at = down + (tl.maximum(expert, 0) * hidden_size + column[:, None]) * inner_size + inner[None, :]
        row_at = activated + (row * top_k + k) * inner_size + inner
        for start in range(0, inner_size, block_inner):
            inside = start + inner < width
            tile = tl.load(tile_at + start, mask=column_inside[:, None] & inside[None, :], other=0.0)
            x = tl.load(row_at + start, mask=inside, other=0.0).to(tl.float32) * weight
            total += tile.to(tl.float32) * x[None, :]
    tl.store(out + row * hidden_size + column, tl.sum(total, axis=1).to(out.dtype.element_ty), mask=column_inside)
