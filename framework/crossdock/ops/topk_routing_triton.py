# mypy: ignore-errors
# pyright: basic
"""Triton kernel of ``topk_routing`` without groups: scores, choice, weights of a row in one program."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def topk_routing_kernel(
    # pointers
    logits,
    bias,
    topk_ids,
    topk_weights,
    # sizes
    num_experts,
    scaling,
    stride_row,
    # meta
    top_k: tl.constexpr,
    top_k_block: tl.constexpr,
    block: tl.constexpr,
    is_softmax: tl.constexpr,
    has_bias: tl.constexpr,
    renormalise: tl.constexpr,
):
    """One program a row of ``logits`` [n, E] float32: ids and weights of its K best experts."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, block)
    inside = expert < num_experts
    # Scores, and what the choice looks at.
    x = tl.load(logits + row * stride_row + expert, mask=inside, other=float("-inf"))
    if is_softmax:
        x = tl.exp(x - tl.max(x, axis=0))
        scores = x / tl.sum(x, axis=0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-x))
    choice = scores
    if has_bias:
        choice = scores + tl.load(bias + expert, mask=inside, other=0.0)
    choice = tl.where(inside, choice, float("-inf"))
    # Best experts one after the other; of equal ones the lower id.
    slot = tl.arange(0, top_k_block)
    ids = tl.zeros((top_k_block,), dtype=tl.int64)
    weights = tl.zeros((top_k_block,), dtype=tl.float32)
    for k in tl.static_range(top_k):
        best = tl.argmax(choice, axis=0)
        ids = tl.where(slot == k, best.to(tl.int64), ids)
        weights = tl.where(slot == k, tl.sum(tl.where(expert == best, scores, 0.0), axis=0), weights)
        choice = tl.where(expert == best, float("-inf"), choice)
    if renormalise:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    at = row * top_k + slot
    tl.store(topk_ids + at, ids, mask=slot < top_k)
    tl.store(topk_weights + at, weights * scaling, mask=slot < top_k)
