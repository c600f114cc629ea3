# mypy: ignore-errors
# pyright: basic
"""Triton kernel of ``norm_rotate``: norm of each head, gain, and rotation of its pairs, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["eps"])
def norm_rotate_kernel(
    # pointers
    rows,
    weight,
    rotation,
    out,
    # sizes
    eps,
    # strides
    stride_row,
    stride_head,
    # meta
    heads: tl.constexpr,
    half: tl.constexpr,
    half_block: tl.constexpr,
    has_norm: tl.constexpr,
):
    """``rotation`` [n, half, 2] float32: cosine and sine of each pair."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, half_block)
    inside = pair < half
    at = rows + row * stride_row + head * stride_head + 2 * pair
    even = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(at + 1, mask=inside, other=0.0).to(tl.float32)
    if has_norm:
        scale = tl.rsqrt(tl.sum(even * even + odd * odd, axis=0) / (2 * half) + eps)
        gain = weight + head * 2 * half + 2 * pair
        # Rounded where separate ops would round: after the norm, and after the gain.
        even = (even * scale).to(out.dtype.element_ty).to(tl.float32)
        odd = (odd * scale).to(out.dtype.element_ty).to(tl.float32)
        even = even * tl.load(gain, mask=inside, other=0.0).to(tl.float32)
        odd = odd * tl.load(gain + 1, mask=inside, other=0.0).to(tl.float32)
        even = even.to(out.dtype.element_ty).to(tl.float32)
        odd = odd.to(out.dtype.element_ty).to(tl.float32)
    turn = rotation + (row * half + pair) * 2
    cosine = tl.load(turn, mask=inside, other=0.0)
    sine = tl.load(turn + 1, mask=inside, other=0.0)
    to = out + (row * heads + head) * 2 * half + 2 * pair
    tl.store(to, (even * cosine - odd * sine).to(out.dtype.element_ty), mask=inside)
    tl.store(to + 1, (even * sine + odd * cosine).to(out.dtype.element_ty), mask=inside)
