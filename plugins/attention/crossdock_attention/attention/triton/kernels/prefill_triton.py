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


@triton.jit
def load_query(rows, live, dim: tl.constexpr, block: tl.constexpr):
    """[rows, block] of queries, zero where there is none."""
    column = tl.arange(0, block)
    return tl.load(rows[:, None] + column[None, :], mask=live[:, None] & (column < dim)[None, :], other=0.0)


@triton.jit
def attend_to_tokens(
    # tiles and descriptors
    query,
    query_rest,
    k,
    k_rest,
    v,
    # where tokens lie
    page_table,
    sequence,
    kv_start,
    page_columns,
    strides,
    first_columns,
    # which tokens, and who sees them
    begin,
    end,
    context,
    first_position,
    log2_scale,
    # running softmax
    running_max,
    running_sum,
    result,
    # meta
    page_tokens: tl.constexpr,
    paged: tl.constexpr,
    described: tl.constexpr,
    key_dim: tl.constexpr,
    rest_dim: tl.constexpr,
    value_dim: tl.constexpr,
    tokens_block: tl.constexpr,
    is_masked: tl.constexpr,
    is_last: tl.constexpr,
):
    """Adds the tokens ``begin`` to ``end`` to the running softmax; ``strides`` and ``first_columns`` are those of k, k_rest and v."""
    lane, token = tl.arange(0, query.shape[0]), tl.arange(0, tokens_block)
    key_column, rest_column = tl.arange(0, query.shape[1]), tl.arange(0, query_rest.shape[1])
    value_column = tl.arange(0, result.shape[1])
    for start in range(begin, end, tokens_block):
        first = 0 if described else token
        at = tile_rows(start + first, sequence, context, page_table, kv_start, page_columns, page_tokens, paged)
        key = load_tile(k, at, first_columns[0], strides[0], key_dim, key_column, described)
        scores = tl.dot(query, key.T, input_precision="ieee")
        if rest_dim > 0:
            rest = load_tile(k_rest, at, first_columns[1], strides[1], rest_dim, rest_column, described)
            scores = tl.dot(query_rest, rest.T, scores, input_precision="ieee")
        if is_masked:
            seen = (start + token)[None, :] <= (first_position + lane)[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1) * log2_scale)
        weights = tl.exp2(scores * log2_scale - new_max[:, None])
        rescale = tl.exp2(running_max - new_max)
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        result = result * rescale[:, None]
        value = load_tile(v, at, first_columns[2], strides[2], value_dim, value_column, described)
        if is_last:
            # A descriptor brings whatever lies behind the context; its weight is 0, but it may be infinite.
            value = tl.where((start + token < context)[:, None], value, 0.0)
        result = tl.dot(weights.to(value.dtype), value, result, input_precision="ieee")
        running_max = new_max
    return running_max, running_sum, result


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
    # strides (row, head)
    q_strides,
    k_strides,
    rest_strides,
    v_strides,
    out_strides,
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
) -> None:
    # A block: sequence, first row in the batch, rows in it, position of its first row.
    entry = blocks + tl.program_id(0) * 4
    sequence, first_row = tl.load(entry), tl.load(entry + 1)
    rows, first_position = tl.load(entry + 2), tl.load(entry + 3)
    head = tl.program_id(1)
    lane = tl.arange(0, rows_block)
    live, row = lane < rows, (first_row + lane).to(tl.int64)
    q_at = q + row * q_strides[0] + head * q_strides[1]
    query = load_query(q_at, live, key_dim, key_block)
    query_rest = load_query(q_at + key_dim, live, rest_dim, rest_block)
    running_max = tl.full((rows_block,), float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros((rows_block,), dtype=tl.float32)
    result = tl.zeros((rows_block, value_block), dtype=tl.float32)
    context = first_position + rows
    kv_start = 0 if paged else tl.load(kv_starts + sequence)
    key_head = head // group
    strides = (k_strides[0], rest_strides[0], v_strides[0])
    first_columns = (key_head * k_strides[1], key_head * rest_strides[1], key_head * v_strides[1])
    # Three stretches of tokens: seen by every row; seen by some rows; the tile that reaches past the context.
    whole = (first_position + 1) // tokens_block * tokens_block
    full = context // tokens_block * tokens_block
    for stretch in tl.static_range(3):
        running_max, running_sum, result = attend_to_tokens(
            query, query_rest, k, k_rest, v, page_table, sequence, kv_start, page_columns, strides, first_columns,
            0 if stretch == 0 else whole if stretch == 1 else full,
            whole if stretch == 0 else full if stretch == 1 else context,
            context, first_position, scale * 1.4426950408889634, running_max, running_sum, result,
            page_tokens, paged, described, key_dim, rest_dim, value_dim, tokens_block, stretch > 0, stretch == 2,
        )  # fmt: skip
    column = tl.arange(0, value_block)
    out_at = out + row[:, None] * out_strides[0] + head * out_strides[1] + column[None, :]
    inside = live[:, None] & (column < value_dim)[None, :]
    tl.store(out_at, (result / running_sum[:, None]).to(out.dtype.element_ty), mask=inside)
