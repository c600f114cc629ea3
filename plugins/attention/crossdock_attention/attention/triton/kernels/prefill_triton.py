# mypy: ignore-errors
"""Triton kernel of prefill: blocks of query rows of one sequence against its context, paged or packed.

Flash attention with a running softmax. Blocks are (sequence, first row) pairs worked out on the host once a batch; a program takes
one block and one query head. Tokens that every row of the block sees come first and need no mask. Keys and values arrive through tensor
descriptors (the bulk copy engine) where a tile of tokens is one piece of memory. Source: Dao, FlashAttention-2 (2023).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_rows(
    position, sequence, context, page_table, kv_start, page_columns, page_tokens: tl.constexpr, paged: tl.constexpr
):
    """Rows of the tokens at ``position`` in the key and value storage; row 0 behind the end of the context."""
    if paged:
        page_at = page_table + sequence.to(tl.int64) * page_columns + position // page_tokens
        page = tl.load(page_at, mask=position < context, other=0)
        row = page.to(tl.int64) * page_tokens + position % page_tokens
    else:
        row = kv_start.to(tl.int64) + tl.where(position < context, position, 0)
    return row


@triton.jit
def load_tile(source, rows, first_column, stride_row, dim, column, described: tl.constexpr):
    """[tokens, columns] of one head. ``rows``: the first row for a descriptor, else one a token."""
    if described:
        tile = source.load([rows.to(tl.int32), first_column])
    else:
        at = source + rows[:, None] * stride_row + first_column + column[None, :]
        tile = tl.load(at, mask=(column < dim)[None, :], other=0.0)
    return tile


@triton.jit(do_not_specialize=["page_columns"])
def prefill_kernel(
    # pointers (k, k_rest, v: descriptors over [rows, heads * dim] where ``described``)
    q,
    k,
    k_rest,
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
    stride_k_row,
    stride_k_head,
    stride_rest_row,
    stride_rest_head,
    stride_v_row,
    stride_v_head,
    stride_out_row,
    stride_out_head,
    # meta
    page_tokens: tl.constexpr,
    paged: tl.constexpr,
    described: tl.constexpr,
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
    rest_column = tl.arange(0, rest_block)
    value_column = tl.arange(0, value_block)
    live = lane < rows
    q_at = q + (first_row + lane).to(tl.int64)[:, None] * stride_q_row + head * stride_q_head
    query = tl.load(q_at + key_column[None, :], mask=live[:, None] & (key_column < key_dim)[None, :], other=0.0)
    if rest_dim > 0:
        rest_mask = live[:, None] & (rest_column < rest_dim)[None, :]
        query_rest = tl.load(q_at + key_dim + rest_column[None, :], mask=rest_mask, other=0.0)
    running_max = tl.full((rows_block,), float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros((rows_block,), dtype=tl.float32)
    result = tl.zeros((rows_block, value_block), dtype=tl.float32)
    context = first_position + rows
    log2_scale = scale * 1.4426950408889634
    kv_start = 0
    if not paged:
        kv_start = tl.load(kv_starts + sequence)
    # Three stretches of tokens: seen by every row; seen by some rows; the tile that reaches past the context.
    whole = (first_position + 1) // tokens_block * tokens_block
    full = context // tokens_block * tokens_block
    for stretch in tl.static_range(3):
        begin = 0 if stretch == 0 else whole if stretch == 1 else full
        end = whole if stretch == 0 else full if stretch == 1 else context
        for start in range(begin, end, tokens_block):
            first = 0 if described else token
            at = tile_rows(start + first, sequence, context, page_table, kv_start, page_columns, page_tokens, paged)
            key = load_tile(k, at, key_head * stride_k_head, stride_k_row, key_dim, key_column, described)
            scores = tl.dot(query, key.T, input_precision="ieee")
            if rest_dim > 0:
                rest_at = key_head * stride_rest_head
                rest = load_tile(k_rest, at, rest_at, stride_rest_row, rest_dim, rest_column, described)
                scores = tl.dot(query_rest, rest.T, scores, input_precision="ieee")
            if stretch > 0:
                seen = (start + token)[None, :] <= (first_position + lane)[:, None]
                scores = tl.where(seen, scores, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(scores, axis=1) * log2_scale)
            weights = tl.exp2(scores * log2_scale - new_max[:, None])
            rescale = tl.exp2(running_max - new_max)
            running_sum = running_sum * rescale + tl.sum(weights, axis=1)
            result = result * rescale[:, None]
            value = load_tile(v, at, key_head * stride_v_head, stride_v_row, value_dim, value_column, described)
            if stretch == 2:
                # A descriptor brings whatever lies behind the context; its weight is 0, but it may be infinite.
                value = tl.where((start + token < context)[:, None], value, 0.0)
            result = tl.dot(weights.to(value.dtype), value, result, input_precision="ieee")
            running_max = new_max
    out_at = out + (first_row + lane).to(tl.int64)[:, None] * stride_out_row + head * stride_out_head
    out_mask = live[:, None] & (value_column < value_dim)[None, :]
    tl.store(out_at + value_column[None, :], (result / running_sum[:, None]).to(out.dtype.element_ty), mask=out_mask)
