# mypy: ignore-errors
"""Triton kernels that order (row, choice) pairs by expert, each expert's run padded to whole blocks of rows.

A program handles a few experts and one segment of the pairs. From the counts of every segment it knows where its part of the run starts,
then writes it in input order. No atomics: the order, and with it every later sum, is the same in each run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from crossdock.ops.early_launch_triton import wait_for_inputs


@triton.jit
def count_of_segment(local_ids, first, end, experts_block: tl.constexpr, scan: tl.constexpr):
    """Pairs of each expert from ``first`` to ``end``; the last bin takes ids that stay elsewhere (-1)."""
    lanes = tl.arange(0, scan)
    total = tl.zeros((experts_block,), dtype=tl.int32)
    for start in range(first, end, scan):
        ids = tl.load(local_ids + start + lanes, mask=start + lanes < end, other=-1).to(tl.int32)
        total += tl.histogram(tl.where(ids < 0, experts_block - 1, ids), experts_block)
    return total


@triton.jit(do_not_specialize=["num_pairs", "segment_pairs"])
def count_pairs_kernel(
    local_ids,
    counts,
    num_pairs,
    segment_pairs,
    experts_block: tl.constexpr,
    scan: tl.constexpr,
    is_early: tl.constexpr,
):
    """counts[segment, expert]: pairs of each expert in one segment."""
    wait_for_inputs(is_early)
    segment = tl.program_id(0)
    end = tl.minimum((segment + 1) * segment_pairs, num_pairs)
    total = count_of_segment(local_ids, segment * segment_pairs, end, experts_block, scan)
    tl.store(counts + segment * experts_block + tl.arange(0, experts_block), total)


@triton.jit(do_not_specialize=["num_pairs", "segment_pairs", "max_blocks"])
def place_pairs_kernel(
    # pointers
    local_ids,
    counts,
    pairs,
    block_experts,
    num_blocks,
    # sizes
    num_pairs,
    segment_pairs,
    num_experts,
    max_blocks,
    # meta
    block_rows: tl.constexpr,
    experts_block: tl.constexpr,
    segments: tl.constexpr,
    experts_each: tl.constexpr,
    scan: tl.constexpr,
    is_early: tl.constexpr,
):
    wait_for_inputs(is_early)
    segment = tl.program_id(1)
    experts = tl.arange(0, experts_block)
    # Pairs of each expert, those of earlier segments, and the blocks that they fill.
    total = tl.zeros((experts_block,), dtype=tl.int32)
    earlier = tl.zeros((experts_block,), dtype=tl.int32)
    if segments == 1:
        total = count_of_segment(local_ids, 0, num_pairs, experts_block, scan)
    else:
        for other in tl.static_range(segments):
            part = tl.load(counts + other * experts_block + experts)
            total += part
            earlier += tl.where(other < segment, part, 0)
    blocks = tl.where(experts < num_experts, (total + block_rows - 1) // block_rows, 0)
    used = tl.sum(blocks, axis=0)
    for i in range(experts_each):
        expert = tl.program_id(0) * experts_each + i
        first_block = tl.sum(tl.where(experts < expert, blocks, 0), axis=0)
        own_blocks = tl.sum(tl.where(experts == expert, blocks, 0), axis=0)
        written = first_block * block_rows + tl.sum(tl.where(experts == expert, earlier, 0), axis=0)
        # Run: own pairs of the segment in input order.
        lanes = tl.arange(0, scan)
        segment_end = tl.minimum((segment + 1) * segment_pairs, num_pairs)
        for start in range(segment * segment_pairs, segment_end, scan):
            ids = tl.load(local_ids + start + lanes, mask=start + lanes < segment_end, other=-1).to(tl.int32)
            mine = (ids == expert).to(tl.int32)
            place = written + tl.cumsum(mine, axis=0) - 1
            tl.store(pairs + place, start + lanes, mask=ids == expert)
            written += tl.sum(mine, axis=0)
        # Fill, by the last segment: the rest of the last block, the expert of each own block, and a share of the unused blocks.
        if segment == segments - 1:
            fill = tl.arange(0, block_rows)
            end = (first_block + own_blocks) * block_rows
            tl.store(pairs + written + fill, num_pairs + fill * 0, mask=written + fill < end)
            for block in range(first_block, first_block + own_blocks):
                tl.store(block_experts + block, expert)
            for block in range(used + expert, max_blocks, num_experts):
                tl.store(block_experts + block, -1)
                tl.store(pairs + block * block_rows + fill, num_pairs + fill * 0)
            if expert == 0:
                tl.store(num_blocks, used)
