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
def load_heads(source, head, stride, live_head, column, dim: tl.constexpr):
    """[heads, columns] of one row."""
    mask = live_head[:, None] & (column < dim)[None, :]
    return tl.load(source + head[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_heads(out, place, values, live_head, column, dim: tl.constexpr):
    """Rows of ``dim`` elements at ``place``."""
    mask = live_head[:, None] & (column < dim)[None, :]
    tl.store(out + place[:, None] * dim + column[None, :], values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def scores_of_new_row(query, source, target, column, dim: tl.constexpr):
    """The step's own key row, copied to the cache, and its scores with the queries."""
    key = tl.load(source + column, mask=column < dim, other=0.0)
    tl.store(target + column, key, mask=column < dim)
    return key, tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], axis=1)


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
    k_at_head,
    v_at_head,
    stride_k_slot,
    stride_v_slot,
    page_tokens: tl.constexpr,
    group_block: tl.constexpr,
    key_dim: tl.constexpr,
    key_block: tl.constexpr,
    rest_dim: tl.constexpr,
    rest_block: tl.constexpr,
    value_dim: tl.constexpr,
    value_block: tl.constexpr,
    value_is_key: tl.constexpr,
    block: tl.constexpr,
):
    """Maximum, sum and unnormalised result over the cached tokens ``first`` to ``last`` of one sequence and key head."""
    token = tl.arange(0, block)
    key_column, rest_column = tl.arange(0, key_block), tl.arange(0, rest_block)
    value_column = tl.arange(0, value_block)
    running_max = tl.full((group_block,), float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros((group_block,), dtype=tl.float32)
    result = tl.zeros((group_block, value_block), dtype=tl.float32)
    for start in range(first, last, block):
        position = start + token
        inside = position < last
        slot = tl.load(pages + position // page_tokens, mask=inside, other=0).to(tl.int64) * page_tokens
        slot += position % page_tokens
        k_at = k_pool + slot[:, None] * stride_k_slot + k_at_head
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
            v_at = v_pool + slot[:, None] * stride_v_slot + v_at_head + value_column[None, :]
            value = tl.load(v_at, mask=inside[:, None] & (value_column < value_dim)[None, :], other=0.0)
        running_max, running_sum, result = add_block(scores, value, running_max, running_sum, result)
    return running_max, running_sum, result


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
    # strides
    stride_q_row,
    stride_q_head,
    stride_rest_row,
    stride_rest_head,
    stride_k_slot,
    stride_k_head,
    stride_v_slot,
    stride_v_head,
    stride_k_new,
    stride_k_new_head,
    stride_v_new,
    stride_v_new_head,
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
):
    wait_for_inputs(is_early)
    row, key_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(seq_lens + row)
    cached = length - 1 if has_new else length
    # Splits of whole blocks, so that a block is read by one program; a short context uses fewer of them.
    blocks = tl.cdiv(cached, block)
    used = tl.minimum(tl.maximum(tl.cdiv(blocks, split_blocks), 1), splits)
    if split < used:
        lane = tl.arange(0, group_block)
        key_column, rest_column = tl.arange(0, key_block), tl.arange(0, rest_block)
        value_column = tl.arange(0, value_block)
        head = key_head * group + lane
        live_head = lane < group
        query = load_heads(q + row.to(tl.int64) * stride_q_row, head, stride_q_head, live_head, key_column, key_dim)
        query_rest = query
        if rest_dim > 0:
            rest_at = q_rest + row.to(tl.int64) * stride_rest_row
            query_rest = load_heads(rest_at, head, stride_rest_head, live_head, rest_column, rest_dim)
        log2_scale = scale * 1.4426950408889634
        running_max, running_sum, result = attend_to_cache(
            query,
            query_rest,
            k_pool,
            v_pool,
            page_table + row.to(tl.int64) * page_columns,
            log2_scale,
            split * blocks // used * block,
            tl.minimum((split + 1) * blocks // used * block, cached),
            key_head * stride_k_head,
            key_head * stride_v_head,
            stride_k_slot,
            stride_v_slot,
            page_tokens,
            group_block,
            key_dim,
            key_block,
            rest_dim,
            rest_block,
            value_dim,
            value_block,
            value_is_key,
            block,
        )
        if has_new:  # noqa: SIM102 - this test is the compiler's, the inner one the device's
            if (split == used - 1) & (length > 0):
                slot = tl.load(kv_slots + row)
                k_from = k_new + row.to(tl.int64) * stride_k_new + key_head * stride_k_new_head
                k_to = k_pool + slot * stride_k_slot + key_head * stride_k_head
                new_key, score = scores_of_new_row(query, k_from, k_to, key_column, key_dim)
                new_value = new_key
                if rest_dim > 0:
                    _, more = scores_of_new_row(query_rest, k_from + key_dim, k_to + key_dim, rest_column, rest_dim)
                    score += more
                if not value_is_key:
                    v_from = v_new + row.to(tl.int64) * stride_v_new + key_head * stride_v_new_head
                    v_to = v_pool + slot * stride_v_slot + key_head * stride_v_head
                    new_value = tl.load(v_from + value_column, mask=value_column < value_dim, other=0.0)
                    tl.store(v_to + value_column, new_value, mask=value_column < value_dim)
                running_max, running_sum, result = add_row(
                    score * log2_scale, new_value, running_max, running_sum, result
                )
        place = (row * tl.num_programs(1) * group + head).to(tl.int64)
        if used == 1:
            running_sum = tl.where(running_sum > 0, running_sum, 1.0)
            store_heads(out, place, result / running_sum[:, None], live_head, value_column, value_dim)
        else:
            place = place * splits
            tl.store(partial_max + place + split, running_max, mask=live_head)
            tl.store(partial_sum + place + split, running_sum, mask=live_head)
            store_heads(partial, place + split, result, live_head, value_column, value_dim)
            # Every thread's stores come before the one thread's counting; the last program to count sees those of all.
            tl.debug_barrier()
            arrival = arrivals + row * tl.num_programs(1) + key_head
            if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == used - 1:
                tl.store(arrival, 0)
                merged = merge_splits(
                    partial, partial_max, partial_sum, place, live_head, value_column, used,
                    group_block, value_dim, value_block, merge_unroll,
                )  # fmt: skip
                store_heads(out, place // splits, merged, live_head, value_column, value_dim)
