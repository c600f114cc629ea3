"""Which rows of a layout carry a token and which are padding: pure data of a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from crossdock.groups import drop_unit_axes
from crossdock.types.layout import Layout, TokenAxis
from crossdock.types.parallel import ParallelSizes, RankPlace
from crossdock.types.step import StepPlan

if TYPE_CHECKING:
    import torch

Span = tuple[int, int]
"""Half-open range of rows."""


def live_spans(layout: Layout, step: StepPlan, sizes: ParallelSizes, place: RankPlace) -> tuple[Span, ...]:
    """Ranges of rows that carry a token, in this rank's tensor of ``layout``; empty ranges are left out.

    Full rows: each replica's live rows at the start of its slot. Replica rows: the first live ones. Slices: the live rows that fall into
    the own slice.
    """
    held = drop_unit_axes(layout, sizes)
    if TokenAxis.ATTN_DP not in held and TokenAxis.ATTN_TP not in held:
        starts = _starts(step.padded_tokens)
        return _spans((start, start + live) for start, live in zip(starts, step.live_tokens, strict=True))
    live = step.live_tokens[place.attn_dp_rank]
    if TokenAxis.ATTN_TP not in held:
        return _spans([(0, live)])
    rows = step.padded_tokens[place.attn_dp_rank] // sizes.attn_tp_size
    first = rows * place.attn_tp_rank
    return _spans([(0, min(max(live - first, 0), rows))])


def rows_in(layout: Layout, step: StepPlan, sizes: ParallelSizes, place: RankPlace) -> int:
    """Rows of this rank's tensor of ``layout``, padding included."""
    held = drop_unit_axes(layout, sizes)
    if TokenAxis.ATTN_TP in held:
        return step.padded_tokens[place.attn_dp_rank] // sizes.attn_tp_size
    return step.padded_tokens[place.attn_dp_rank] if TokenAxis.ATTN_DP in held else step.buffer_rows


def padded_spans(layout: Layout, step: StepPlan, sizes: ParallelSizes, place: RankPlace) -> tuple[Span, ...]:
    """Ranges of rows that are padding: the complement of ``live_spans``."""
    spans: list[Span] = []
    at = 0
    for start, stop in live_spans(layout, step, sizes, place):
        spans.append((at, start))
        at = stop
    spans.append((at, rows_in(layout, step, sizes, place)))
    return _spans(spans)


def live_mask(layout: Layout, step: StepPlan, sizes: ParallelSizes, place: RankPlace) -> torch.Tensor:
    """[rows] bool on the CPU, True where a row carries a token."""
    import torch

    mask = torch.zeros(rows_in(layout, step, sizes, place), dtype=torch.bool)
    for start, stop in live_spans(layout, step, sizes, place):
        mask[start:stop] = True
    return mask


def _starts(counts: tuple[int, ...]) -> list[int]:
    starts: list[int] = []
    at = 0
    for count in counts:
        starts.append(at)
        at += count
    return starts


def _spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    return tuple((start, stop) for start, stop in spans if stop > start)
