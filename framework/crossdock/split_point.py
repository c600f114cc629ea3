"""Where a batch is cut in two, from lengths alone (the facts, section 7.1); also what the cut does to the step's plan."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs

from crossdock.groups import align_rows
from crossdock.padding import padded_tokens
from crossdock.types.parallel import ParallelSizes
from crossdock.types.step import ForwardMode, StepPlan

BALANCE_THRESHOLD = 0.48
"""Smallest share of rows that a half may have before a sequence is cut instead; at most 0.5, and 0 never cuts one."""


@attrs.frozen(kw_only=True)
class SplitPoint:
    """The first micro-batch of a replica's batch; the second is the rest."""

    rows: int
    """Live rows."""
    sequences: int
    """Sequences with rows in it."""
    cuts_sequence: bool = False
    """The last of them goes on in the second micro-batch."""


def split_point(
    mode: ForwardMode, query_lens: Sequence[int], threshold: float = BALANCE_THRESHOLD
) -> SplitPoint | None:
    """The cut of one replica's batch; None when it cannot be split, then no replica overlaps this step.

    Prefill and mixed batches: at the sequence boundary that balances best, or inside a sequence when that is too uneven. Decode and
    verify: half of the sequences. Idle: two empty halves.
    """
    match mode:
        case ForwardMode.IDLE | ForwardMode.PREBUILT:
            return SplitPoint(rows=0, sequences=0)
        case ForwardMode.DECODE | ForwardMode.VERIFY:
            half = len(query_lens) // 2
            return SplitPoint(rows=sum(query_lens[:half]), sequences=half) if half else None
        case ForwardMode.PREFILL | ForwardMode.MIXED:
            return _balanced(query_lens, threshold)


def child_plans(plan: StepPlan, sizes: ParallelSizes) -> tuple[StepPlan, StepPlan]:
    """The plans of the two micro-batches of an overlapped step: modes as the parent's, counts of every replica for each half.

    Each half is padded by the parent's mode to a multiple of attn_tp_size; in a captured step each takes half of the bucket.
    """
    first = plan.overlap_rows
    second = tuple(live - rows for live, rows in zip(plan.live_tokens, first, strict=True))
    return _child(plan, first, sizes), _child(plan, second, sizes)


def _child(plan: StepPlan, live: tuple[int, ...], sizes: ParallelSizes) -> StepPlan:
    aligned = [align_rows(rows, sizes.attn_tp_size) for rows in live]
    bucket = None if plan.bucket is None else align_rows(-(-plan.bucket // 2), sizes.attn_tp_size)
    padded = padded_tokens(plan.padding_mode, aligned) if bucket is None else (bucket,) * len(live)
    return attrs.evolve(plan, live_tokens=live, padded_tokens=padded, bucket=bucket, overlap_rows=())


def _balanced(query_lens: Sequence[int], threshold: float) -> SplitPoint | None:
    total = sum(query_lens)
    boundary = _best_boundary(query_lens)
    left = sum(query_lens[:boundary])
    is_uneven = total > 0 and not threshold <= left / total <= 1 - threshold
    if threshold > 0 and is_uneven:
        cut = _cut_inside(query_lens)
        if cut is not None:
            return cut
    return SplitPoint(rows=left, sequences=boundary) if boundary else None


def _best_boundary(query_lens: Sequence[int]) -> int:
    """Sequences left of the boundary with the smallest difference of both sides; the later one of equals; 0 for one sequence."""
    total = sum(query_lens)
    best, smallest = 0, float("inf")
    for index, left in enumerate(itertools.accumulate(query_lens[:-1]), start=1):
        difference = abs(left - (total - left))
        if difference > smallest:
            break
        best, smallest = index, difference
    return best


def _cut_inside(query_lens: Sequence[int]) -> SplitPoint | None:
    """The cut at half of all rows, inside a sequence; None where it would leave a sequence without a row."""
    half = sum(query_lens) // 2
    ends = list(itertools.accumulate(query_lens))
    index = next(number for number, end in enumerate(ends) if end > half)
    start = ends[index] - query_lens[index]
    if index + 1 > half or half == start:
        return None
    return SplitPoint(rows=half, sequences=index + 1, cuts_sequence=True)
