"""Sums over steps against sums by hand."""

from __future__ import annotations

from crossdock.engine_seams import AgreedStep
from crossdock.step_totals import StepTotalsCounter
from crossdock.types.request import ReplicaLoad
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan, StepRecord
from crossdock.types.step_totals import ITERATION_TOKENS, HistogramCounts, empty_histogram, observed


def step(rows: tuple[int, ...], pairs: tuple[int, ...], *, wait_s: float = 0.0, is_probe: bool = False) -> AgreedStep:
    plan = StepPlan(
        step=1,
        eplb_pass=1,
        live_tokens=rows,
        padded_tokens=rows,
        padding_mode=PaddingMode.SUM_LEN,
        forward_mode=ForwardMode.DECODE,
        dispatch_mode=DispatchMode.NORMAL,
        overlap=False,
        overlap_reason="",
    )
    records = tuple(
        StepRecord(num_tokens=count, attention_pairs=pair, is_health_check=int(is_probe))
        for count, pair in zip(rows, pairs, strict=True)
    )
    return AgreedStep(plan=plan, records=records, wait_s=wait_s)


def test_a_replica_counts_its_rows_and_what_the_busiest_had_more() -> None:
    first, second = StepTotalsCounter(attn_dp_rank=0), StepTotalsCounter(attn_dp_rank=1)
    for counter in (first, second):
        counter.after_step(step((6, 2), (30, 40), wait_s=0.0001))
        counter.after_step(step((3, 0), (9, 0), wait_s=2.0))
        counter.after_step(step((0, 0), (0, 0), wait_s=5.0))
        counter.after_step(step((1000, 1000), (1, 1), is_probe=True))
        assert not counter.is_busy
    one, two = first.totals, second.totals
    assert (one.active_steps, one.idle_steps, two.active_steps, two.idle_steps) == (2, 0, 1, 1)
    assert (one.tokens, one.tokens_behind, two.tokens, two.tokens_behind) == (9, 0, 2, 4 + 3)
    assert (one.attention_pairs, one.attention_pairs_behind) == (39, 10)
    assert (two.attention_pairs, two.attention_pairs_behind) == (40, 9)
    assert two.iteration_tokens.sum == 2.0
    assert one.token_imbalance_ratio.sum == 6 * 2 / 8 + 3 * 2 / 3
    assert sum(two.token_imbalance_ratio.counts) == 0
    assert (one.sync_wait_s.counts[0], one.sync_wait_s.counts[-1]) == (1, 1)


def test_a_value_on_a_bound_belongs_to_the_bucket_that_the_bound_ends() -> None:
    histogram = empty_histogram(ITERATION_TOKENS)
    for value in (1, 2, 8, 9, 16384, 16385):
        histogram = observed(histogram, ITERATION_TOKENS, value)
    assert histogram == HistogramCounts(counts=(1, 2, 1, *[0] * 9, 1, 1), sum=1 + 2 + 8 + 9 + 16384 + 16385)


def test_a_load_report_gets_what_the_scheduler_does_not_know() -> None:
    load = ReplicaLoad(attn_dp_rank=0, running=1, waiting=0, tokens=4, attention_pairs=10, kv_usage=0.5, step=8)
    counter = StepTotalsCounter()
    counter.after_step(step((5,), (15,)))
    full = counter.added_to(load, preemptions=3, gauges={"some": 1.0})
    assert (full.preemptions, full.steps.tokens, full.gauges, full.tokens) == (3, 5, {"some": 1.0}, 4)
