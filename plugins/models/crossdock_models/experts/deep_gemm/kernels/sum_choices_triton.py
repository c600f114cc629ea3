# mypy: ignore-errors
"""Triton kernel of ``sum_choices``: a program a row and part of it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_choices_kernel(
    # pointers
    out,
    positions,
    weights,
    total,
    # sizes
    hidden_size,
    # meta
    top_k: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    summed = tl.zeros((block,), dtype=tl.float32)
    for k in tl.static_range(top_k):
        place = tl.load(positions + row * top_k + k).to(tl.int64)
        live = column < tl.where(place >= 0, hidden_size, 0)
        part = tl.load(out + place * hidden_size + column, mask=live, other=0.0).to(tl.float32)
        summed += part * tl.load(weights + row * top_k + k)
    tl.store(total + row * hidden_size + column, summed.to(total.dtype.element_ty), mask=column < hidden_size)
