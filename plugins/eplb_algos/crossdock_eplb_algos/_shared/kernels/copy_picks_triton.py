# mypy: ignore-errors
# pyright: basic
"""``copy_picks``: one program a block of choices, which looks through all choices before it. And the counts of all choices."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expert_counts_kernel(ids_ptr, counts_ptr, num_ids, num_experts, block: tl.constexpr, bins: tl.constexpr):
    # ids [n] int64 (-1 none) -> counts [E] int64. One program: a histogram of shared memory, block by block.
    lane = tl.arange(0, block)
    bin = tl.arange(0, bins)
    counts = tl.zeros([bins], dtype=tl.int32)
    for begin in range(0, num_ids, block):
        ids = tl.load(ids_ptr + begin + lane, mask=begin + lane < num_ids, other=-1)
        # What names no expert goes to the last bin, behind all of them.
        counts += tl.histogram(tl.where(ids < 0, bins - 1, ids).to(tl.int32), bins)
    tl.store(counts_ptr + bin, counts.to(tl.int64), mask=bin < num_experts)


@triton.jit
def copy_picks_kernel(
    ids_ptr,
    ends_ptr,
    row_of_expert_ptr,
    first_slot_ptr,
    slots_ptr,
    picks_ptr,
    num_ids,
    num_rows,
    num_ranks,
    block: tl.constexpr,
    others_block: tl.constexpr,
    ranks_block: tl.constexpr,
):
    # ids [n] int64, ends [M, R] int64, row_of_expert and first_slot [E], slots [M, R] int64 -> picks [n] int64.
    first = tl.program_id(0) * block
    lane = tl.arange(0, block)
    own = first + lane
    ids = tl.load(ids_ptr + own, mask=own < num_ids, other=-1)

    # How many earlier choices name the same expert.
    place = tl.zeros([block], dtype=tl.int32)
    others = tl.arange(0, others_block)
    for begin in range(0, first + block, others_block):
        other = begin + others
        seen = tl.load(ids_ptr + other, mask=other < num_ids, other=-2)
        same = (seen[None, :] == ids[:, None]) & (other[None, :] < own[:, None])
        place += tl.sum(same.to(tl.int32), axis=1)

    # The first copy that has room for that one.
    known = tl.maximum(ids, 0)
    row = tl.load(row_of_expert_ptr + known)
    has_choice = row < num_rows
    rank = tl.arange(0, ranks_block)
    mask = has_choice[:, None] & (rank[None, :] < num_ranks)
    ends = tl.load(ends_ptr + row[:, None] * num_ranks + rank[None, :], mask=mask, other=0)
    passed = tl.sum(((place[:, None] >= ends) & mask).to(tl.int64), axis=1)
    passed = tl.minimum(passed, num_ranks - 1)
    chosen = tl.load(slots_ptr + row * num_ranks + passed, mask=has_choice, other=0)
    pick = tl.where(has_choice, chosen, tl.load(first_slot_ptr + known))
    tl.store(picks_ptr + own, tl.where(ids >= 0, pick, -1), mask=own < num_ids)
