# mypy: ignore-errors
"""Triton kernel of ``quantise_rows``: one program a row and group of blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from crossdock.ops.fp8_block_torch import FP8_MAX
from crossdock.ops.quantise_rows_torch import SCALE_FLOOR

LARGEST = tl.constexpr(FP8_MAX)
FLOOR = tl.constexpr(SCALE_FLOOR)


@triton.jit
def block_scales(values):
    """[blocks, 128] float32 -> [blocks] scales that bring each block's largest magnitude to float8's."""
    return tl.maximum(tl.max(tl.abs(values), axis=1), FLOOR) / LARGEST


@triton.jit
def quantise_rows_kernel(
    # pointers
    rows,
    payload,
    scales,
    # sizes
    num_blocks,
    # strides
    row_stride,
    scale_row_stride,
    scale_block_stride,
    # meta
    blocks: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """See ``quantise_rows``: every block of a row alone."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * blocks + tl.arange(0, blocks)
    columns = index[:, None] * block + tl.arange(0, block)[None, :]
    inside = (index < num_blocks)[:, None]
    values = tl.load(rows + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    found = block_scales(values)
    quantised = (values / found[:, None]).to(tl.float8e4nv)
    tl.store(payload + row * num_blocks * block + columns, quantised, mask=inside)
    tl.store(scales + row * scale_row_stride + index * scale_block_stride, found, mask=index < num_blocks)
