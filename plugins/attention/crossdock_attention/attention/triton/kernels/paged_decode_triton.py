# mypy: ignore-errors
"""Triton kernel of paged decode: one query row a sequence, the context cut into splits that the last program to finish merges.

Flash-decoding: each program keeps a running maximum, a running sum and an unnormalised result over its split of the context. The
queries that share a key head are the rows of one product, so each cached row is read once for all of them. MLA is the case of one key
head whose value is the front of the key. The step's own row is taken from where the projection left it, and put into the cache for later
steps on the way. Source: Dao et al., Flash-Decoding (2023).
"""

from __future__ import annotations

import triton
import triton.language as tl
from crossdock.ops.early_launch_triton import wait_for_inputs

from crossdock_attention.attention.triton.kernels.running_softmax_triton import add_block, add_row


@triton.jit
def merge_splits(
    partial,
    partial_max,
    partial_sum,
    place,
    live_head,
    value_column,
    used,
    group_block: tl.constexpr,
    value_dim: tl.constexpr,
    value_block: tl.constexpr,
    unroll: tl.constexpr,
):
    """The result over the first ``used`` splits, in their order; each of them saw a token."""
    running_max = tl.full((group_block,), float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros((group_block,), dtype=tl.float32)
    result = tl.zeros((group_block, value_block), dtype=tl.float32)
    inside = live_head[:, None] & (value_column < value_dim)[None, :]
    for first in range(0, used, unroll):
        for i in tl.static_range(unroll):
            split = tl.zeros((group_block,), dtype=tl.int32) + first + i
            at = place + split
            is_used = live_head & (split < used)
            part_max = tl.load(partial_max + at, mask=is_used, other=float("-inf"))
            part_sum = tl.load(partial_sum + at, mask=is_used, other=0.0)
            part_at = partial + at[:, None] * value_dim + value_column[None, :]
            part = tl.load(part_at, mask=inside & is_used[:, None], other=0.0)
            new_max = tl.maximum(running_max, part_max)
            rescale, factor = tl.exp2(running_max - new_max), tl.exp2(part_max - new_max)
            running_sum = running_sum * rescale + part_sum * factor
            result = result * rescale[:, None] + part * factor[:, None]
            running_max = new_max
    return result / running_sum[:, None]


@triton.jit
def load_heads(source, head, stride, live_head, dim: tl.constexpr, block: tl.constexpr):
    """[heads, block] of one row, zero where there is none."""
    column = tl.arange(0, block)
    mask = live_head[:, None] & (column < dim)[None, :]
    return tl.load(source + head[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_heads(out, place, values, live_head, column, dim: tl.constexpr) -> None:
    """Rows of ``dim`` elements at ``place``."""
    mask = live_head[:, None] & (column < dim)[None, :]
    tl.store(out + place[:, None] * dim + column[None, :], values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def copy_row(source, target, column, dim: tl.constexpr):
    """A row on its way into the cache."""
    row = tl.load(source + column, mask=column < dim, other=0.0)
    tl.store(target + column, row, mask=column < dim)
    return row


@triton.jit
def scores_of_row(query, row):
    """One key with each query."""
    return tl.sum(query.to(tl.float32) * row.to(tl.float32)[None, :], axis=1)


@triton.jit
def attend_to_cache(
    query,
    query_rest,
    k_pool,
    v_pool,
    pages,
    log2_scale,
    first,
    last,
    stride_k_slot,
    stride_v_slot,
    page_tokens: tl.constexpr,
    key_dim: tl.constexpr,
    rest_dim: tl.constexpr,
    value_dim: tl.constexpr,
    value_block: tl.constexpr,
    value_is_key: tl.constexpr,
    block: tl.constexpr,
):
    """Maximum, sum and unnormalised result over the cached tokens ``first`` to ``last`` of one sequence and key head."""
    token = tl.arange(0, block)
    key_column, rest_column = tl.arange(0, query.shape[1]), tl.arange(0, query_rest.shape[1])
    value_column = tl.arange(0, value_block)
    running_max = tl.full((query.shape[0],), float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros((query.shape[0],), dtype=tl.float32)
    result = tl.zeros((query.shape[0], value_block), dtype=tl.float32)
    for start in range(first, last, block):
        position = start + token
        inside = position < last
        slot = tl.load(pages + position // page_tokens, mask=inside, other=0).to(tl.int64) * page_tokens
        slot += position % page_tokens
        k_at = k_pool + slot[:, None] * stride_k_slot
        key = tl.load(k_at + key_column[None, :], mask=inside[:, None] & (key_column < key_dim)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if rest_dim > 0:
            key_mask = inside[:, None] & (rest_column < rest_dim)[None, :]
            key_rest = tl.load(k_at + key_dim + rest_column[None, :], mask=key_mask, other=0.0)
            scores = tl.dot(query_rest, tl.trans(key_rest), scores, input_precision="ieee")
        scores = tl.where(inside[None, :], scores * log2_scale, float("-inf"))
        if value_is_key:
            value = key
        else:
            v_at = v_pool + slot[:, None] * stride_v_slot + value_column[None, :]
            value = tl.load(v_at, mask=inside[:, None] & (value_column < value_dim)[None, :], other=0.0)
        running_max, running_sum, result = add_block(scores, value, running_max, running_sum, result)
    return running_max, running_sum, result


@triton.jit
def add_new_row(
    query,
    query_rest,
    k_from,
    k_to,
    v_from,
    v_to,
    log2_scale,
    running_max,
    running_sum,
    result,
    key_dim: tl.constexpr,
    rest_dim: tl.constexpr,
    value_dim: tl.constexpr,
    value_is_key: tl.constexpr,
):
    """Attends to the step's own row as well, and copies it into the cache."""
    new_key = copy_row(k_from, k_to, tl.arange(0, query.shape[1]), key_dim)
    new_value, score = new_key, scores_of_row(query, new_key)
    if rest_dim > 0:
        rest = copy_row(k_from + key_dim, k_to + key_dim, tl.arange(0, query_rest.shape[1]), rest_dim)
        score += scores_of_row(query_rest, rest)
    if not value_is_key:
        new_value = copy_row(v_from, v_to, tl.arange(0, result.shape[1]), value_dim)
    return add_row(score * log2_scale, new_value, running_max, running_sum, result)


@triton.jit
def store_or_merge(
    out,
    partial,
    partial_max,
    partial_sum,
    arrival,
    place,
    split,
    used,
    live_head,
    running_max,
    running_sum,
    result,
    value_dim: tl.constexpr,
    splits: tl.constexpr,
    unroll: tl.constexpr,
) -> None:
    """The result of a context in one split; of several, each leaves its part, and the last program to come here puts them together."""
    value_column = tl.arange(0, result.shape[1])
    if used == 1:
        result = result / tl.where(running_sum > 0, running_sum, 1.0)[:, None]
        store_heads(out, place, result, live_head, value_column, value_dim)
    else:
        parts = place * splits
        tl.store(partial_max + parts + split, running_max, mask=live_head)
        tl.store(partial_sum + parts + split, running_sum, mask=live_head)
        store_heads(partial, parts + split, result, live_head, value_column, value_dim)
        # Every thread's stores come before the one thread's counting; the last program to count sees those of all.
        tl.debug_barrier()
        if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == used - 1:
            tl.store(arrival, 0)
            merged = merge_splits(
                partial, partial_max, partial_sum, parts, live_head, value_column, used,
                result.shape[0], value_dim, result.shape[1], unroll,
            )  # fmt: skip
            store_heads(out, place, merged, live_head, value_column, value_dim)


@triton.jit(do_not_specialize=["page_columns"])
def paged_decode_kernel(
    # pointers
    q,
    q_rest,
    k_pool,
    v_pool,
    k_new,
    v_new,
    kv_slots,
    page_table,
    seq_lens,
    out,
    partial,
    partial_max,
    partial_sum,
    arrivals,
    # sizes
    page_columns,
    scale,
    # strides: from row or cache slot to the next, from head to head
    q_strides,
    rest_strides,
    k_strides,
    v_strides,
    k_new_strides,
    v_new_strides,
    # meta
    page_tokens: tl.constexpr,
    group: tl.constexpr,
    group_block: tl.constexpr,
    key_dim: tl.constexpr,
    key_block: tl.constexpr,
    rest_dim: tl.constexpr,
    rest_block: tl.constexpr,
    value_dim: tl.constexpr,
    value_block: tl.constexpr,
    value_is_key: tl.constexpr,
    has_new: tl.constexpr,
    splits: tl.constexpr,
    block: tl.constexpr,
    split_blocks: tl.constexpr,
    merge_unroll: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    wait_for_inputs(is_early)
    row, key_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(seq_lens + row)
    cached = length - 1 if has_new else length
    # Splits of whole blocks, so that a block is read by one program; a short context uses fewer of them.
    blocks = tl.cdiv(cached, block)
    used = tl.minimum(tl.maximum(tl.cdiv(blocks, split_blocks), 1), splits)
    if split < used:
        at_row = row.to(tl.int64)
        lane = tl.arange(0, group_block)
        head, live_head = key_head * group + lane, lane < group
        query = load_heads(q + at_row * q_strides[0], head, q_strides[1], live_head, key_dim, key_block)
        rest_at = q_rest + at_row * rest_strides[0]
        query_rest = load_heads(rest_at, head, rest_strides[1], live_head, rest_dim, rest_block)
        keys, values = k_pool + key_head * k_strides[1], v_pool + key_head * v_strides[1]
        log2_scale = scale * 1.4426950408889634
        first, last = split * blocks // used * block, tl.minimum((split + 1) * blocks // used * block, cached)
        running_max, running_sum, result = attend_to_cache(
            query, query_rest, keys, values, page_table + at_row * page_columns, log2_scale, first, last,
            k_strides[0], v_strides[0], page_tokens, key_dim, rest_dim, value_dim, value_block, value_is_key, block,
        )  # fmt: skip
        if has_new:  # noqa: SIM102 - this test is the compiler's, the inner one the device's
            if (split == used - 1) & (length > 0):
                slot = tl.load(kv_slots + row)
                k_from = k_new + at_row * k_new_strides[0] + key_head * k_new_strides[1]
                v_from = v_new + at_row * v_new_strides[0] + key_head * v_new_strides[1]
                running_max, running_sum, result = add_new_row(
                    query, query_rest, k_from, keys + slot * k_strides[0], v_from, values + slot * v_strides[0],
                    log2_scale, running_max, running_sum, result, key_dim, rest_dim, value_dim, value_is_key,
                )  # fmt: skip
        place = (row * tl.num_programs(1) * group + head).to(tl.int64)
        store_or_merge(
            out, partial, partial_max, partial_sum, arrivals + row * tl.num_programs(1) + key_head, place, split, used,
            live_head, running_max, running_sum, result, value_dim, splits, merge_unroll,
        )  # fmt: skip
