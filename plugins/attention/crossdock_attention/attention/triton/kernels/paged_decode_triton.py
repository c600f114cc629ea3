# mypy: ignore-errors
"""Triton kernels of paged decode: one query row a sequence, the context cut into splits that are merged afterwards.

Flash-decoding: each program keeps a running maximum, a running sum and an unnormalised result over its split of the context. The
queries that share a key head are the rows of one product, so each cached row is read once for all of them. MLA is the case of one key
head whose value is the front of the key. Source: Dao et al., Flash-Decoding (2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from crossdock_attention.attention.triton.kernels.running_softmax_triton import add_block


@triton.jit(do_not_specialize=["page_columns"])
def paged_decode_kernel(
    # pointers
    q,
    k_pool,
    v_pool,
    page_table,
    seq_lens,
    partial,
    partial_max,
    partial_sum,
    # sizes
    page_columns,
    scale,
    # strides
    stride_q_row,
    stride_q_head,
    stride_k_slot,
    stride_k_head,
    stride_v_slot,
    stride_v_head,
    # meta
    page_tokens: tl.constexpr,
    group: tl.constexpr,
    group_block: tl.constexpr,
    key_dim: tl.constexpr,
    key_block: tl.constexpr,
    rope_dim: tl.constexpr,
    rope_block: tl.constexpr,
    value_dim: tl.constexpr,
    value_block: tl.constexpr,
    value_is_key: tl.constexpr,
    splits: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    key_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(seq_lens + row)
    # Splits of whole blocks, so that a block is read by one program.
    blocks = tl.cdiv(length, block)
    first = split * blocks // splits * block
    last = tl.minimum((split + 1) * blocks // splits * block, length)
    lane = tl.arange(0, group_block)
    token = tl.arange(0, block)
    key_column = tl.arange(0, key_block)
    value_column = tl.arange(0, value_block)
    head = key_head * group + lane
    live_head = lane < group
    q_at = q + row.to(tl.int64) * stride_q_row + head[:, None] * stride_q_head
    query = tl.load(q_at + key_column[None, :], mask=live_head[:, None] & (key_column < key_dim)[None, :], other=0.0)
    if rope_dim > 0:
        rope_column = tl.arange(0, rope_block)
        rope_mask = live_head[:, None] & (rope_column < rope_dim)[None, :]
        query_rope = tl.load(q_at + key_dim + rope_column[None, :], mask=rope_mask, other=0.0)
    running_max = tl.full((group_block,), float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros((group_block,), dtype=tl.float32)
    result = tl.zeros((group_block, value_block), dtype=tl.float32)
    for start in range(first, last, block):
        position = start + token
        inside = position < last
        page = tl.load(page_table + row.to(tl.int64) * page_columns + position // page_tokens, mask=inside, other=0)
        slot = page.to(tl.int64) * page_tokens + position % page_tokens
        k_at = k_pool + slot[:, None] * stride_k_slot + key_head * stride_k_head
        key = tl.load(k_at + key_column[None, :], mask=inside[:, None] & (key_column < key_dim)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(key))
        if rope_dim > 0:
            key_mask = inside[:, None] & (rope_column < rope_dim)[None, :]
            key_rope = tl.load(k_at + key_dim + rope_column[None, :], mask=key_mask, other=0.0)
            scores = tl.dot(query_rope, tl.trans(key_rope), scores)
        scores = tl.where(inside[None, :], scores * (scale * 1.4426950408889634), float("-inf"))
        if value_is_key:
            value = key
        else:
            v_at = v_pool + slot[:, None] * stride_v_slot + key_head * stride_v_head + value_column[None, :]
            value = tl.load(v_at, mask=inside[:, None] & (value_column < value_dim)[None, :], other=0.0)
        running_max, running_sum, result = add_block(scores, value, running_max, running_sum, result)
    heads = tl.num_programs(1) * group
    place = ((row * heads + head) * splits + split).to(tl.int64)
    tl.store(partial_max + place, running_max, mask=live_head)
    tl.store(partial_sum + place, running_sum, mask=live_head)
    out_mask = live_head[:, None] & (value_column < value_dim)[None, :]
    tl.store(partial + place[:, None] * value_dim + value_column[None, :], result, mask=out_mask)


@triton.jit
def merge_splits_kernel(
    # pointers
    partial,
    partial_max,
    partial_sum,
    out,
    # meta
    value_dim: tl.constexpr,
    value_block: tl.constexpr,
    splits: tl.constexpr,
    splits_block: tl.constexpr,
):
    """One program a (row, head): the softmax over the whole context from its splits; zero for an empty context."""
    place = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, splits_block)
    column = tl.arange(0, value_block)
    used = split < splits
    maxima = tl.load(partial_max + place * splits + split, mask=used, other=float("-inf"))
    sums = tl.load(partial_sum + place * splits + split, mask=used, other=0.0)
    top = tl.max(maxima, axis=0)
    factors = tl.where(sums > 0, tl.exp2(maxima - top), 0.0)
    total = tl.sum(factors * sums, axis=0)
    mask = used[:, None] & (column < value_dim)[None, :]
    parts = tl.load(partial + (place * splits + split[:, None]) * value_dim + column[None, :], mask=mask, other=0.0)
    merged = tl.sum(tl.where(factors[:, None] > 0, parts * factors[:, None], 0.0), axis=0)
    merged = merged / tl.where(total > 0, total, 1.0)
    tl.store(out + place * value_dim + column, merged.to(out.dtype.element_ty), mask=column < value_dim)
