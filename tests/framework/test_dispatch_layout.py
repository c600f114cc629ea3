"""Row counts of every rank by layout."""

from __future__ import annotations

import attrs
import pytest
from crossdock.dispatch_layout import dispatch_step, rows_of_rank
from crossdock.groups import resolve_sizes
from crossdock.types.layout import ATTN_ROWS, FULL_ROWS, LOCAL_ROWS, Layout
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan

SIZES = resolve_sizes(ranks=4, attn_dp_size=2, attn_tp_size=2)


@pytest.mark.parametrize(
    ("layout", "counts"),
    [(FULL_ROWS, (6, 6, 6, 6)), (ATTN_ROWS, (4, 4, 2, 2)), (LOCAL_ROWS, (2, 2, 1, 1))],
)
def test_replicas_with_4_and_2_rows(layout: Layout, counts: tuple[int, ...]) -> None:
    assert tuple(rows_of_rank(layout, (4, 2), rank, SIZES) for rank in range(4)) == counts


PLAN = StepPlan(
    step=1,
    eplb_pass=0,
    live_tokens=(3, 0),
    padded_tokens=(4, 2),
    padding_mode=PaddingMode.SUM_LEN,
    forward_mode=ForwardMode.DECODE,
    dispatch_mode=DispatchMode.LOW_LATENCY,
    overlap=False,
    overlap_reason="",
)


def test_a_step_says_how_many_rows_every_rank_brings() -> None:
    step = dispatch_step(PLAN, LOCAL_ROWS, SIZES, epoch=2)
    assert (step.source_counts, step.mode, step.bucket, step.epoch) == ((2, 2, 1, 1), DispatchMode.LOW_LATENCY, None, 2)


@pytest.mark.parametrize(("layout", "rows"), [(FULL_ROWS, 16), (ATTN_ROWS, 8), (LOCAL_ROWS, 4)])
def test_a_captured_step_counts_its_bucket_in_the_rows_that_the_dispatcher_takes(layout: Layout, rows: int) -> None:
    captured = attrs.evolve(PLAN, padded_tokens=(8, 8), padding_mode=PaddingMode.MAX_LEN, bucket=8)
    assert dispatch_step(captured, layout, SIZES).bucket == rows == rows_of_rank(layout, (8, 8), 0, SIZES)
