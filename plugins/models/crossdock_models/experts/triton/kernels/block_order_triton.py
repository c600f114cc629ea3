# mypy: ignore-errors
"""Triton kernels that order (row, choice) pairs by expert, each expert's run padded to whole blocks of rows.

Where half blocks are told apart, the last block of an expert that is at most half full comes behind all others. A program places one segment of the pairs. From the counts of every segment it knows where its part of each expert's run starts, then writes
in input order. No atomics: the order, and with it every later sum, is the same in each run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from crossdock.ops.early_launch_triton import wait_for_inputs


@triton.jit
def counts_of(local_ids, first, end, experts_block: tl.constexpr, scan: tl.constexpr):
    """Pairs of each expert from ``first`` to ``end``; ids that stay elsewhere (-1) are not counted."""
    lanes = tl.arange(0, scan)
    total = tl.zeros((experts_block,), dtype=tl.int32)
    for start in range(first, end, scan):
        ids = tl.load(local_ids + start + lanes, mask=start + lanes < end, other=-1).to(tl.int32)
        total += tl.histogram(tl.where(ids < 0, 0, ids), experts_block, mask=ids >= 0)
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
) -> None:
    """counts[segment, expert]: pairs of each expert in one segment."""
    wait_for_inputs(is_early)
    first = tl.program_id(0) * segment_pairs
    total = counts_of(local_ids, first, tl.minimum(first + segment_pairs, num_pairs), experts_block, scan)
    tl.store(counts + tl.program_id(0) * experts_block + tl.arange(0, experts_block), total)


@triton.jit
def place_segment(
    local_ids, pairs, places, first, end, next_place, place_end, jump, scan: tl.constexpr, halves: tl.constexpr
) -> None:
    """Pairs from ``first`` to ``end`` to their places.

    ``next_place`` [experts] is where the next pair of each expert goes; from ``place_end`` on it goes ``jump`` further, to a half block.
    """
    experts_block: tl.constexpr = next_place.shape[0]
    lane, row, column = tl.arange(0, scan), tl.arange(0, scan)[:, None], tl.arange(0, scan)[None, :]
    for start in range(first, end, scan):
        ids = tl.load(local_ids + start + lane, mask=start + lane < end, other=-1).to(tl.int32)
        id_of_row = tl.load(local_ids + start + row, mask=start + row < end, other=-1).to(tl.int32)
        id_of_column = tl.load(local_ids + start + column, mask=start + column < end, other=-1).to(tl.int32)
        earlier = tl.sum(((id_of_row == id_of_column) & (column < row)).to(tl.int32), axis=1)
        expert = tl.maximum(ids, 0)
        place = tl.gather(next_place, expert, axis=0) + earlier
        if halves:
            is_over = place >= tl.gather(place_end, expert, axis=0)
            place += tl.where(is_over, tl.gather(jump, expert, axis=0), 0)
        next_place += tl.histogram(expert, experts_block, mask=ids >= 0)
        tl.store(pairs + place, start + lane, mask=ids >= 0)
        tl.store(places + start + lane, tl.where(ids >= 0, place, -1), mask=start + lane < end)


@triton.jit(do_not_specialize=["num_pairs", "segment_pairs", "max_blocks"])
def place_pairs_kernel(
    # pointers
    local_ids,
    counts,
    pairs,
    places,
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
    scan: tl.constexpr,
    count_scan: tl.constexpr,
    is_counted: tl.constexpr,
    halves: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    """Program p places segment p, where there is one, and fills up the blocks of expert p, where there is one."""
    wait_for_inputs(is_early)
    program = tl.program_id(0)
    first = program * segment_pairs
    experts = tl.arange(0, experts_block)
    # Pairs of each expert, and those of earlier segments.
    total = tl.zeros((experts_block,), dtype=tl.int32)
    before = tl.zeros((experts_block,), dtype=tl.int32)
    if is_counted:
        some: tl.constexpr = 32 if segments > 32 else segments
        all_parts = tl.zeros((some, experts_block), dtype=tl.int32)
        earlier_parts = tl.zeros((some, experts_block), dtype=tl.int32)
        for other in range(0, segments, some):
            segment = other + tl.arange(0, some)[:, None]
            part = tl.load(counts + segment * experts_block + experts[None, :])
            all_parts += part
            earlier_parts += tl.where(segment < program, part, 0)
        total, before = tl.sum(all_parts, axis=0), tl.sum(earlier_parts, axis=0)
    else:
        before = counts_of(local_ids, 0, tl.minimum(first, num_pairs), experts_block, count_scan)
        total = before + counts_of(local_ids, first, num_pairs, experts_block, count_scan)
    # Blocks that all of them fill: whole ones of each expert in a row, then a half one of some experts.
    blocks = tl.where(experts < num_experts, (total + block_rows - 1) // block_rows, 0)
    half = tl.zeros((experts_block,), dtype=tl.int32)
    if halves:
        half += ((total > 0) & (total - (blocks - 1) * block_rows <= block_rows // 2)).to(tl.int32)
    whole = blocks - half
    whole_first = tl.cumsum(whole, axis=0) - whole
    half_first = tl.sum(whole, axis=0) + tl.cumsum(half, axis=0) - half
    if program < segments:
        start, place_end = whole_first * block_rows + before, (whole_first + whole) * block_rows
        place_segment(local_ids, pairs, places, first, tl.minimum(first + segment_pairs, num_pairs),
                      start, place_end, half_first * block_rows - place_end, scan, halves)  # fmt: skip
    used = tl.sum(blocks, axis=0)
    if program < num_experts:
        # Fill: the rest of the last block, the expert of each own block, and a share of the unused blocks.
        own = experts == program
        block_first = tl.sum(tl.where(own, whole_first, 0), axis=0)
        block_end = block_first + tl.sum(tl.where(own, whole, 0), axis=0)
        last = tl.sum(tl.where(own, tl.where(half > 0, half_first, whole_first + whole - 1), 0), axis=0)
        filled = tl.sum(tl.where(own, total - (blocks - 1) * block_rows, 0), axis=0)
        fill = tl.arange(0, block_rows)
        if tl.sum(tl.where(own, total, 0), axis=0) > 0:
            tl.store(pairs + last * block_rows + fill, num_pairs + fill * 0, mask=fill >= filled)
            tl.store(block_experts + last, program)
        for block in range(block_first, block_end):
            tl.store(block_experts + block, program)
        for block in range(used + program, max_blocks, num_experts):
            tl.store(block_experts + block, -1)
            tl.store(pairs + block * block_rows + fill, num_pairs + fill * 0)
        if program == 0:
            tl.store(num_blocks, used)
            tl.store(num_blocks + 1, tl.sum(whole, axis=0))
