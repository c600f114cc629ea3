# mypy: ignore-errors
# pyright: basic
"""Triton kernel of ``norm_rotate``: norm of each head, gain, and rotation of its pairs, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from crossdock.ops.early_launch_triton import wait_for_inputs


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
    heads_block: tl.constexpr,
    half: tl.constexpr,
    half_block: tl.constexpr,
    has_norm: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    """``rotation`` [n, half, 2] float32: cosine and sine of each pair. A program takes ``heads_block`` heads of a row."""
    wait_for_inputs(is_early)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads_block + tl.arange(0, heads_block)
    # Heads are read whole and cut into pairs afterwards: reads of every other element would be twice as many.
    column = tl.arange(0, 2 * half_block)
    inside = (head < heads)[:, None] & (column < 2 * half)[None, :]
    x = tl.load(rows + row * stride_row + head[:, None] * stride_head + column[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32)
    if has_norm:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / (2 * half) + eps)
        gain = tl.load(weight + head[:, None] * 2 * half + column[None, :], mask=inside, other=0.0).to(tl.float32)
        # Rounded where separate ops would round: after the norm, and after the gain.
        x = (x * scale[:, None]).to(out.dtype.element_ty).to(tl.float32)
        x = (x * gain).to(out.dtype.element_ty).to(tl.float32)
    turn_at = rotation + row * 2 * half + column
    turn = tl.load(turn_at, mask=column < 2 * half, other=0.0)
    cosine, sine = tl.split(tl.reshape(turn, (1, half_block, 2)))
    even, odd = tl.split(tl.reshape(x, (heads_block, half_block, 2)))
    turned = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
    turned = tl.reshape(turned, (heads_block, 2 * half_block))
    at = out + (row * heads + head[:, None]) * 2 * half + column[None, :]
    tl.store(at, turned.to(out.dtype.element_ty), mask=inside)
