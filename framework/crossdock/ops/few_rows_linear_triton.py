# mypy: ignore-errors
# pyright: basic
"""Triton kernel of ``few_rows_linear``: a matrix streamed once past a handful of rows, without the tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from crossdock.ops.early_launch_triton import fetch_rows, wait_for_inputs


@triton.jit
def few_rows_linear_kernel(
    # pointers
    rows,
    weight,
    bias,
    out,
    # sizes
    out_features,
    in_features,
    # strides
    stride_row,
    # meta
    num_rows: tl.constexpr,
    rows_block: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    num_lines: tl.constexpr,
    has_bias: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    """A program makes ``block_out`` columns of every row. Sums stay spread over the threads until the end."""
    row = tl.arange(0, rows_block)
    column = tl.program_id(0) * block_out + tl.arange(0, block_out)
    inner = tl.arange(0, block_in)
    column_inside = column < out_features
    weight_at = weight + column[:, None].to(tl.int64) * in_features + inner[None, :]
    row_at = rows + row[:, None] * stride_row + inner[None, :]
    if is_early:
        # The matrix is on its way before the rows are there.
        fetch_rows(weight, tl.minimum(column, out_features - 1), in_features, num_lines)
    wait_for_inputs(is_early)
    total = tl.zeros((rows_block, block_out, block_in), dtype=tl.float32)
    for start in range(0, in_features, block_in):
        inside = start + inner < in_features
        w = tl.load(weight_at + start, mask=column_inside[:, None] & inside[None, :], other=0.0).to(tl.float32)
        x = tl.load(row_at + start, mask=(row < num_rows)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += x[:, None, :] * w[None, :, :]
    result = tl.sum(total, axis=2)
    if has_bias:
        result += tl.load(bias + column, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    at = out + row[:, None] * out_features + column[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(row < num_rows)[:, None] & column_inside[None, :])
