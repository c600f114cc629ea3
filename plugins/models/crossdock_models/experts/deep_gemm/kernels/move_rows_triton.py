# mypy: ignore-errors
"""Triton kernel of ``move_rows``: a program reads a part of a row once and writes it to every place of the row."""

from __future__ import annotations

import triton
import triton.language as tl
from crossdock.ops.quantise_rows_triton import block_scales


@triton.jit(do_not_specialize=["capacity"])
def move_rows_kernel(
    # pointers
    rows,
    scales,
    local_ids,
    ranks,
    starts,
    placed,
    placed_scales,
    positions,
    # sizes
    num_blocks,
    capacity,
    # strides
    row_stride,
    scale_expert_stride,
    scale_block_stride,
    # meta
    top_k: tl.constexpr,
    blocks: tl.constexpr,
    block: tl.constexpr,
    quantise: tl.constexpr,
    has_scales: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * blocks + tl.arange(0, blocks)
    columns = index[:, None] * block + tl.arange(0, block)[None, :]
    # Rows that carry nothing are not read.
    wanted = tl.load(local_ids + row * top_k)
    for k in tl.static_range(1, top_k):
        wanted = tl.maximum(wanted, tl.load(local_ids + row * top_k + k))
    inside = index < tl.where(wanted >= 0, num_blocks, 0)
    values = tl.load(rows + row * row_stride + columns, mask=inside[:, None], other=0.0)
    if quantise:
        found = block_scales(values.to(tl.float32))
        values = (values.to(tl.float32) / found[:, None]).to(tl.float8e4nv)
    elif has_scales:
        found = tl.load(scales + row * num_blocks + index, mask=inside, other=0.0)
    for k in tl.static_range(top_k):
        pair = row * top_k + k
        expert = tl.load(local_ids + pair)
        if expert >= 0:
            place = (tl.load(starts + expert) + tl.load(ranks + pair)).to(tl.int64)
            tl.store(placed + place * num_blocks * block + columns, values, mask=inside[:, None])
            if quantise or has_scales:
                at = expert * scale_expert_stride + index.to(tl.int64) * scale_block_stride + place - expert * capacity
                tl.store(placed_scales + at, found, mask=inside)
            if tl.program_id(1) == 0:
                tl.store(positions + pair, place.to(tl.int32))
        elif tl.program_id(1) == 0:
            tl.store(positions + pair, -1)
