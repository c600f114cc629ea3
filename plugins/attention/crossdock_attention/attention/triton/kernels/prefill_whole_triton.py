# mypy: ignore-errors
"""Triton kernel of prefill for blocks whose context ends on a tile: one group of warps fetches, two compute, each half of the rows.

The compiler makes the groups from one loop, which must be plain: everything comes through tensor descriptors, the causal mask is always
taken, and no tile may reach past the context. Other blocks are ``prefill_triton``'s. Source: Shah et al., FlashAttention-3 (2024).

The queries' descriptor is made here: the compiler halves its tile for the two groups, and of a descriptor from the host it would halve
the expected bytes only (Triton 3.6), so that the wait for them never ends.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["page_columns"])
def prefill_whole_kernel(
    # descriptors over [rows, heads * dim]
    k,
    k_rest,
    v,
    # pointers
    q,
    page_table,
    kv_starts,
    blocks,
    out,
    # sizes
    num_rows,
    page_columns,
    scale,
    # strides
    stride_q_row,
    stride_q_head,
    stride_k_head,
    stride_rest_head,
    stride_v_head,
    stride_out_row,
    stride_out_head,
    # meta
    page_tokens: tl.constexpr,
    paged: tl.constexpr,
    group: tl.constexpr,
    key_dim: tl.constexpr,
    rest_dim: tl.constexpr,
    value_dim: tl.constexpr,
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
    width = tl.num_programs(1) * stride_q_head
    described = tl.make_tensor_descriptor(q, [num_rows, width], [stride_q_row, 1], [rows_block, key_dim])
    query = described.load([first_row, head * stride_q_head])
    if rest_dim > 0:
        rest_described = tl.make_tensor_descriptor(q, [num_rows, width], [stride_q_row, 1], [rows_block, rest_dim])
        query_rest = rest_described.load([first_row, head * stride_q_head + key_dim])
    running_max = tl.full((rows_block,), float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros((rows_block,), dtype=tl.float32)
    result = tl.zeros((rows_block, value_dim), dtype=tl.float32)
    log2_scale = scale * 1.4426950408889634
    if paged:
        pages = page_table + sequence.to(tl.int64) * page_columns
    else:
        kv_start = tl.load(kv_starts + sequence)
    for start in tl.range(0, first_position + rows, tokens_block, warp_specialize=True):
        if paged:  # noqa: SIM108 - only one of the two is compiled
            at = tl.load(pages + start // page_tokens) * page_tokens + start % page_tokens
        else:
            at = kv_start + start
        key = k.load([at, key_head * stride_k_head])
        scores = tl.dot(query, key.T)
        if rest_dim > 0:
            rest = k_rest.load([at, key_head * stride_rest_head])
            scores = tl.dot(query_rest, rest.T, scores)
        seen = (start + token)[None, :] <= (first_position + lane)[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1) * log2_scale)
        weights = tl.exp2(scores * log2_scale - new_max[:, None])
        rescale = tl.exp2(running_max - new_max)
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        result = result * rescale[:, None]
        value = v.load([at, key_head * stride_v_head])
        result = tl.dot(weights.to(value.dtype), value, result)
        running_max = new_max
    result = result / running_sum[:, None]
    out_at = out + (first_row + lane).to(tl.int64)[:, None] * stride_out_row + head * stride_out_head
    out_at += tl.arange(0, value_dim)[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=(lane < rows)[:, None])
