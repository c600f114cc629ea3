# mypy: ignore-errors
# pyright: basic
"""Triton kernel of ``store_rows``: a step's rows into one or two pools, one program a row."""

from __future__ import annotations

import triton
import triton.language as tl
from crossdock.ops.early_launch_triton import wait_for_inputs


@triton.jit
def store_rows_kernel(
    # pointers
    slots,
    first,
    second,
    first_pool,
    second_pool,
    # sizes
    first_width,
    second_width,
    # strides
    stride_first,
    stride_second,
    # meta
    block: tl.constexpr,
    has_second: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    wait_for_inputs(is_early)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    column = tl.arange(0, block)
    inside = column < first_width
    value = tl.load(first + row * stride_first + column, mask=inside)
    tl.store(first_pool + slot * first_width + column, value, mask=inside)
    if has_second:
        inside = column < second_width
        value = tl.load(second + row * stride_second + column, mask=inside)
        tl.store(second_pool + slot * second_width + column, value, mask=inside)
