"""A replica's vote, and what it learns from the steps that ran."""

from __future__ import annotations

import attrs
from crossdock.engine_seams import AgreedStep
from crossdock.observe.timeline import Timeline
from crossdock.overlap_gate import OverlapGate, with_vote
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan, StepRecord
from crossdock.types.strategy import OverlapLimits

LIMITS = OverlapLimits()


def record(rows: int, mode: ForwardMode = ForwardMode.DECODE) -> StepRecord:
    return StepRecord(num_tokens=rows, local_forward_mode=int(mode))


def gate() -> OverlapGate:
    return OverlapGate(limits=LIMITS, timeline=Timeline(rank=0), gauges={})


def ran(one: OverlapGate, seconds: float, rows: int, *, overlaps: bool, reason: str = "") -> None:
    one.timeline.last_pass_s = seconds
    plan = StepPlan(
        step=1,
        eplb_pass=1,
        live_tokens=(rows, 0),
        padded_tokens=(rows, 0),
        padding_mode=PaddingMode.SUM_LEN,
        forward_mode=ForwardMode.DECODE,
        dispatch_mode=DispatchMode.NORMAL,
        overlap=overlaps,
        overlap_reason=reason,
    )
    one.after_step(AgreedStep(plan=plan, records=(record(rows), StepRecord())))


def test_rows_that_can_be_cut_are_a_yes_with_the_size_of_the_first_part() -> None:
    voted = with_vote(record(960, ForwardMode.PREFILL), [10, 900, 20, 30], LIMITS)
    assert (voted.local_can_run_overlap, voted.overlap_rows) == (1, 480)


def test_one_row_is_a_no_and_no_row_is_a_yes() -> None:
    assert with_vote(record(1), [1], LIMITS).local_can_run_overlap == 0
    idle = with_vote(record(0, ForwardMode.IDLE), [], LIMITS)
    assert (idle.local_can_run_overlap, idle.overlap_rows) == (1, 0)


def test_nothing_measured_is_no_gain_and_no_loss() -> None:
    one = gate()
    assert one.vote(record(8), [1] * 8).overlap_gain_us == 0
    ran(one, 0.010, 8, overlaps=True)
    assert one.vote(record(8), [1] * 8).overlap_gain_us == 0


def test_the_gain_is_the_difference_of_both_times_for_steps_of_that_size() -> None:
    one = gate()
    ran(one, 0.008, 8, overlaps=False, reason="probe")
    ran(one, 0.006, 8, overlaps=True)
    assert one.vote(record(8), [1] * 8).overlap_gain_us == 2000
    assert one.vote(record(12), [1] * 12).overlap_gain_us == 3000
    assert one.vote(record(16), [1] * 16).overlap_gain_us == 0
    assert one.vote(record(8, ForwardMode.PREFILL), [4, 4]).overlap_gain_us == 0


def test_overlap_that_costs_time_is_a_loss_until_it_pays_again() -> None:
    one = gate()
    ran(one, 0.008, 8, overlaps=False, reason="probe")
    ran(one, 0.010, 8, overlaps=True)
    assert one.vote(record(8), [1] * 8).overlap_gain_us == -2000
    for _ in range(20):
        ran(one, 0.004, 8, overlaps=True)
    assert one.vote(record(8), [1] * 8).overlap_gain_us > 3000


def test_steps_are_counted_by_reason_for_the_metrics() -> None:
    one = gate()
    ran(one, 0.1, 8, overlaps=False, reason="too_small")
    ran(one, 0.1, 8, overlaps=False, reason="too_small")
    ran(one, 0.1, 8, overlaps=True)
    assert one.gauges == {"overlap_off_too_small_steps": 2.0, "overlap_on_steps": 1.0}
    assert not one.is_busy


def test_a_step_without_rows_teaches_nothing() -> None:
    one = gate()
    ran(one, 5.0, 0, overlaps=False, reason="all_idle")
    assert one.gauges == {}
    assert attrs.asdict(one.vote(record(8), [1] * 8))["overlap_gain_us"] == 0
