# mypy: ignore-errors
# pyright: basic
"""Triton kernel of ``latent_rotate``: a row's rotated query parts, its latent norm and its rotated key, where they lie."""

from __future__ import annotations

import triton
import triton.language as tl

from crossdock.ops.early_launch_triton import wait_for_inputs


@triton.jit
def turn_pairs(at, inside, cosine, sine, heads_block: tl.constexpr, half_block: tl.constexpr) -> None:
    """Rotates the pairs of [heads_block, 2 * half_block] elements at ``at`` in place."""
    x = tl.load(at, mask=inside, other=0.0)
    even, odd = tl.split(tl.reshape(x.to(tl.float32), (heads_block, half_block, 2)))
    turned = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
    tl.store(at, tl.reshape(turned, (heads_block, 2 * half_block)).to(x.dtype), mask=inside)


@triton.jit(do_not_specialize=["eps"])
def latent_rotate_kernel(
    # pointers
    queries,
    latent,
    gain,
    rotation,
    # sizes
    eps,
    # strides
    stride_query,
    stride_latent,
    # meta
    heads: tl.constexpr,
    heads_block: tl.constexpr,
    query_dim: tl.constexpr,
    rank: tl.constexpr,
    rank_block: tl.constexpr,
    half: tl.constexpr,
    half_block: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    """``rotation`` [n, half, 2] float32. Programs (row, i): i = 0 does the latent row, the others heads of the queries."""
    wait_for_inputs(is_early)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, 2 * half_block)
    turn = tl.load(rotation + row * 2 * half + column, mask=column < 2 * half, other=0.0)
    cosine, sine = tl.split(tl.reshape(turn, (1, half_block, 2)))
    if tl.program_id(1) == 0:
        element = tl.arange(0, rank_block)
        at = latent + row * stride_latent
        x = tl.load(at + element, mask=element < rank, other=0.0)
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / rank + eps)
        weight = tl.load(gain + element, mask=element < rank, other=0.0).to(tl.float32)
        tl.store(at + element, (wide * scale * weight).to(x.dtype), mask=element < rank)
        key_at = at + rank + column[None, :]
        turn_pairs(key_at, (column < 2 * half)[None, :], cosine, sine, 1, half_block)
    else:
        head = (tl.program_id(1) - 1) * heads_block + tl.arange(0, heads_block)
        first = query_dim - 2 * half
        query_at = queries + row * stride_query + head[:, None] * query_dim + first + column[None, :]
        inside = (head < heads)[:, None] & (column < 2 * half)[None, :]
        turn_pairs(query_at, inside, cosine, sine, heads_block, half_block)
