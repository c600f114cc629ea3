# mypy: ignore-errors
"""Triton kernel of prefill: blocks of query rows of one sequence against its context, paged or packed.

Flash attention with a running softmax. Blocks are (sequence, first row) pairs worked out on the host once a batch; a program takes
one block and one query head. Source: Dao, FlashAttention-2 (2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from crossdock_attention.attention.triton.kernels.running_softmax_triton import add_block


@triton.jit(do_not_specialize=["page_columns"])
def prefill_kernel(
    # pointers
    q,
    k,
    v,
    page_table,
    kv_starts,
    blocks,
    out,
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
    stride_out_row,
    stride_out_head,
    # meta
    page_tokens: tl.constexpr,
    paged: tl.constexpr,
    group: tl.constexpr,
    key_dim: tl.constexpr,
    key_block: tl.constexpr,
    rest_dim: tl.constexpr,
    rest_block: tl.constexpr,
    value_dim: tl.constexpr,
    value_block: tl.constexpr,
    rows_block: tl.constexpr,
    tokens_block: tl.constexpr,
):
    # A block: sequence, first row in the batch, rows in it, position of its first row.
    entry = blocks + tl.program_id(0) * 4
    sequence, first_row = tl.load(entry), tl.load(entry + 1)
    rows, first_position = tl.load(entry + 2), tl.load(entry + 3)
    head = tl.program_id(1)
    key_head = head // group
    lane = tl.arange(0, rows_block)
    token = tl.arange(0, tokens_block)
    key_column = tl.arange(0, key_block)
    value_column = tl.arange(0, value_block)
    live = lane < rows
    q_at = q + (first_row + lane).to(tl.int64)[:, None] * stride_q_row + head * stride_q_head
    query = tl.load(q_at + key_column[None, :], mask=live[:, None] & (key_column < key_dim)[None, :], other=0.0)
    if rest_dim > 0:
        rest_column = tl.arange(0, rest_block)
        rest_mask = live[:, None] & (rest_column < rest_dim)[None, :]
        query_rest = tl.load(q_at + key_dim + rest_column[None, :], mask=rest_mask, other=0.0)
    running_max = tl.full((rows_block,), float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros((rows_block,), dtype=tl.float32)
    result = tl.zeros((rows_block, value_block), dtype=tl.float32)
    context = first_position + rows
    for start in range(0, context, tokens_block):
        position = start + token
        inside = position < context
        if paged:
            page_at = page_table + sequence.to(tl.int64) * page_columns + position // page_tokens
            page = tl.load(page_at, mask=inside, other=0)
            slot = page.to(tl.int64) * page_tokens + position % page_tokens
        else:
            slot = tl.load(kv_starts + sequence).to(tl.int64) + position
        k_at = k + slot[:, None] * stride_k_slot + key_head * stride_k_head
        key = tl.load(k_at + key_column[None, :], mask=inside[:, None] & (key_column < key_dim)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(key))
        if rest_dim > 0:
            key_mask = inside[:, None] & (rest_column < rest_dim)[None, :]
            key_rest = tl.load(k_at + key_dim + rest_column[None, :], mask=key_mask, other=0.0)
            scores = tl.dot(query_rest, tl.trans(key_rest), scores)
        seen = inside[None, :] & (position[None, :] <= (first_position + lane)[:, None])
        scores = tl.where(seen, scores * (scale * 1.4426950408889634), float("-inf"))
        v_at = v + slot[:, None] * stride_v_slot + key_head * stride_v_head + value_column[None, :]
        value = tl.load(v_at, mask=inside[:, None] & (value_column < value_dim)[None, :], other=0.0)
        running_max, running_sum, result = add_block(scores, value, running_max, running_sum, result)
    out_at = out + (first_row + lane).to(tl.int64)[:, None] * stride_out_row + head * stride_out_head
    out_mask = live[:, None] & (value_column < value_dim)[None, :]
    result = result / tl.where(running_sum > 0, running_sum, 1.0)[:, None]
    tl.store(out_at + value_column[None, :], result.to(out.dtype.element_ty), mask=out_mask)
