# mypy: ignore-errors
"""Triton kernels that count the pairs of each expert and lay out segments."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(local_ids, counts, ranks, num_pairs, block: tl.constexpr) -> None:
    """A pair's number is what the expert's counter held before it."""
    pair = tl.program_id(0) * block + tl.arange(0, block)
    expert = tl.load(local_ids + pair, mask=pair < num_pairs, other=-1)
    rank = tl.atomic_add(counts + tl.maximum(expert, 0), 1, mask=expert >= 0, sem="relaxed")
    tl.store(ranks + pair, rank, mask=expert >= 0)


@triton.jit(do_not_specialize=["num_places"])
def segments_kernel(
    # pointers
    counts,
    starts,
    groups,
    # sizes
    num_experts,
    num_places,
    # meta
    experts_block: tl.constexpr,
    segment: tl.constexpr,
) -> None:
    experts = tl.arange(0, experts_block)
    count = tl.load(counts + experts, mask=experts < num_experts, other=0)
    aligned = (count + segment - 1) // segment * segment
    ends = tl.cumsum(aligned, axis=0)
    # The segment's expert: as many as end before it. Behind the last one there is none.
    first = tl.program_id(0) * segment
    expert = tl.sum(((ends <= first) & (experts < num_experts)).to(tl.int32), axis=0)
    place = first + tl.arange(0, segment)
    tl.store(groups + place, tl.where(expert < num_experts, expert, -1) + place * 0, mask=place < num_places)
    if tl.program_id(0) == 0:
        tl.store(starts + experts, ends - aligned, mask=experts < num_experts)
