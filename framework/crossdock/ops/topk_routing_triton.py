# mypy: ignore-errors
# pyright: basic
"""Triton kernel of ``topk_routing``: scores, groups, choice, weights and slots of a row in one program."""

from __future__ import annotations

import triton
import triton.language as tl

from crossdock.ops.early_launch_triton import wait_for_inputs


@triton.jit
def without_other_groups(
    choice, num_groups: tl.constexpr, group_size: tl.constexpr, kept_groups: tl.constexpr, two_best: tl.constexpr
):
    """[experts] with minus infinity outside the ``kept_groups`` best groups."""
    grouped = tl.reshape(choice, (num_groups, group_size))
    best = tl.max(grouped, axis=1)
    if two_best:
        first = tl.argmax(grouped, axis=1)
        is_first = tl.arange(0, group_size)[None, :] == first[:, None]
        best += tl.max(tl.where(is_first, float("-inf"), grouped), axis=1)
    group = tl.arange(0, num_groups)
    kept = tl.zeros((num_groups,), dtype=tl.int32)
    for _ in tl.static_range(kept_groups):
        top = tl.argmax(best, axis=0)
        kept = tl.where(group == top, 1, kept)
        best = tl.where(group == top, float("-inf"), best)
    return tl.reshape(tl.where(kept[:, None] > 0, grouped, float("-inf")), (num_groups * group_size,))


@triton.jit
def topk_routing_kernel(
    # pointers
    logits,
    bias,
    slots,
    padded_rows,
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
    num_groups: tl.constexpr,
    kept_groups: tl.constexpr,
    two_best: tl.constexpr,
    is_softmax: tl.constexpr,
    has_bias: tl.constexpr,
    has_slots: tl.constexpr,
    has_padding: tl.constexpr,
    renormalise: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    """One program a row of ``logits`` [n, E] float32: ids (slots, where given) and weights of its K best experts."""
    wait_for_inputs(is_early)
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
    if kept_groups < num_groups:
        choice = without_other_groups(choice, num_groups, block // num_groups, kept_groups, two_best)
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
    # Where they are now, and -1 in a row that carries no token.
    if has_slots:
        ids = tl.load(slots + ids)
    if has_padding:
        ids = tl.where(tl.load(padded_rows + row), -1, ids)
    at = row * top_k + slot
    tl.store(topk_ids + at, ids, mask=slot < top_k)
    tl.store(topk_weights + at, weights * scaling, mask=slot < top_k)
