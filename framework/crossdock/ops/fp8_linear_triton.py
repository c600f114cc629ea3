# mypy: ignore-errors
"""Triton kernel of ``fp8_linear``: weights stay float8 in memory, rows come in float8 with scales or in their own dtype."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def fp8_linear_kernel(
    # pointers
    rows,
    row_scales,
    weight,
    scales,
    out,
    # sizes
    num_rows,
    out_features,
    in_features,
    # strides
    row_stride,
    scale_row_stride,
    scale_block_stride,
    # meta
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
    quantised: tl.constexpr,
) -> None:
    """See ``fp8_linear``: a tile of the result; a tile's columns lie in one block of scales."""
    # Tiles of one weight column run next to one another over ``group`` row tiles, so that the weight is found in L2.
    row_tiles, column_tiles = tl.cdiv(num_rows, block_rows), tl.cdiv(out_features, block_columns)
    first = (tl.program_id(0) // (group * column_tiles)) * group
    in_group = tl.program_id(0) % (group * column_tiles)
    size = tl.minimum(row_tiles - first, group)
    row = (first + in_group % size) * block_rows + tl.arange(0, block_rows)
    column = (in_group // size) * block_columns + tl.arange(0, block_columns)
    inner = tl.arange(0, block)
    row_inside, column_inside = row < num_rows, column < out_features
    row_at = rows + row[:, None].to(tl.int64) * row_stride + inner[None, :]
    weight_at = weight + column[None, :].to(tl.int64) * in_features + inner[:, None]
    num_blocks = in_features // block
    scale_at = scales + (in_group // size) * block_columns // block * num_blocks
    total = tl.zeros((block_rows, block_columns), dtype=tl.float32)
    for index in range(num_blocks):
        left = tl.load(row_at + index * block, mask=row_inside[:, None], other=0.0)
        right = tl.load(weight_at + index * block, mask=column_inside[None, :], other=0.0)
        scale = tl.load(scale_at + index)
        if quantised:
            row_scale = tl.load(
                row_scales + row * scale_row_stride + index * scale_block_stride, mask=row_inside, other=0.0
            )
            total += tl.dot(left, right) * (row_scale * scale)[:, None]
        else:
            total += tl.dot(left, right.to(left.dtype), input_precision="ieee") * scale
    at = out + row[:, None].to(tl.int64) * out_features + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=row_inside[:, None] & column_inside[None, :])
