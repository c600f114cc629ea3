"""A replica's vote, and what it learns from the steps that ran."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from crossdock.engine_seams import AgreedStep
from crossdock.observe.timeline import Timeline
from crossdock.overlap_gate import OverlapGate, with_vote
from crossdock.types.model import Op, OpKind
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan, StepRecord
from crossdock.types.strategy import OverlapLimits

LIMITS = OverlapLimits(min_decode_rows=4)
PREFILL_ROWS = 1000


class SetClock:
    """Shows what it is told."""

    def __init__(self) -> None:
        self.now_us = 0.0

    def mark(self) -> float:
        return self.now_us

    def read_us(self, marks: Sequence[float]) -> list[float]:
        return list(marks)


@attrs.frozen(kw_only=True)
class Took:
    """What a pass takes: prompt rows, or a bucket of decode rows."""

    overlaps: bool
    compute_us: float
    communication_us: float = 0.0
    bucket: int | None = None


class Rank:
    """A gate with its timeline and the passes that it sees."""

    def __init__(self) -> None:
        self.clock = SetClock()
        self.timeline = Timeline(rank=0, clock=self.clock)
        self.gate = OverlapGate(limits=LIMITS, timeline=self.timeline, gauges={})
        self.step = 0

    def gain_us(self, rows: int, mode: ForwardMode = ForwardMode.PREFILL) -> int:
        return self.gate.vote(record(rows, mode), [rows - rows // 2, rows // 2]).overlap_gain_us

    def begin(self, took: Took) -> AgreedStep:
        """Launches a pass."""
        self.step += 1
        marks = self.timeline.begin_pass(self.step)
        if marks is not None and took.bucket is None:
            marks.begin()
            half_us = took.communication_us / 2
            for kind, us in (
                (OpKind.EXPERTS, took.compute_us),
                (OpKind.DISPATCH_BEGIN, half_us),
                (OpKind.DISPATCH_END, half_us),
            ):
                self.clock.now_us += us
                marks.op_ended(0, Op(name=kind.value, kind=kind, layer=0, fn=lambda context: None))
        else:
            self.clock.now_us += took.compute_us + took.communication_us
        self.timeline.pass_launched()
        rows = took.bucket or PREFILL_ROWS
        mode = ForwardMode.DECODE if took.bucket else ForwardMode.PREFILL
        plan = StepPlan(
            step=self.step,
            eplb_pass=1,
            live_tokens=(rows, 0),
            padded_tokens=(rows, 0),
            padding_mode=PaddingMode.SUM_LEN,
            forward_mode=mode,
            dispatch_mode=DispatchMode.NORMAL,
            overlap=took.overlaps,
            overlap_reason="" if took.overlaps else "probe",
            bucket=took.bucket,
        )
        return AgreedStep(plan=plan, records=(record(rows, mode), StepRecord()))

    def run(self, overlaps: bool, compute_us: float, communication_us: float = 0.0, bucket: int | None = None) -> None:
        """A pass from vote to result."""
        if bucket is None:
            self.gain_us(PREFILL_ROWS)
        took = Took(overlaps=overlaps, compute_us=compute_us, communication_us=communication_us, bucket=bucket)
        agreed = self.begin(took)
        self.timeline.end_pass()
        self.gate.after_step(agreed)


def record(rows: int, mode: ForwardMode = ForwardMode.DECODE) -> StepRecord:
    return StepRecord(num_tokens=rows, local_forward_mode=int(mode))


def test_rows_that_can_be_cut_are_a_yes_with_the_size_of_the_first_part() -> None:
    voted = with_vote(record(960, ForwardMode.PREFILL), [10, 900, 20, 30], LIMITS)
    assert (voted.local_can_run_overlap, voted.overlap_rows) == (1, 480)


def test_one_row_is_a_no_and_no_row_is_a_yes() -> None:
    assert with_vote(record(1), [1], LIMITS).local_can_run_overlap == 0
    idle = with_vote(record(0, ForwardMode.IDLE), [], LIMITS)
    assert (idle.local_can_run_overlap, idle.overlap_rows) == (1, 0)


def test_nothing_is_predicted_before_two_passes_of_both_kinds() -> None:
    rank = Rank()
    for overlaps in (True, False, True):
        rank.run(overlaps, 6000, 2000)
        assert rank.gain_us(PREFILL_ROWS) == 0
    rank.run(False, 6000, 4000)
    assert rank.gain_us(PREFILL_ROWS) != 0


def test_the_gain_is_the_difference_of_the_stage_times_for_steps_of_that_size() -> None:
    rank = Rank()
    for _ in range(2):
        rank.run(False, 6000, 4000)
        rank.run(True, 7000, 1000)
    assert rank.gain_us(PREFILL_ROWS) == 2000
    assert rank.gain_us(600) == 1200
    assert rank.gain_us(2 * PREFILL_ROWS) == 0, "another size"
    assert rank.gain_us(PREFILL_ROWS, ForwardMode.DECODE) == 0, "another mode"


def test_overlap_that_costs_time_is_a_loss_until_it_pays_again() -> None:
    rank = Rank()
    for _ in range(2):
        rank.run(False, 6000, 2000)
        rank.run(True, 10000)
    assert rank.gain_us(PREFILL_ROWS) == -2000
    for _ in range(4):
        rank.timeline.times_next = True
        agreed = rank.begin(Took(overlaps=True, compute_us=5000))
        rank.timeline.end_pass()
        rank.gate.after_step(agreed)
    assert rank.gain_us(PREFILL_ROWS) > 2000


def test_where_next_to_nothing_can_be_hidden_overlap_is_not_even_tried() -> None:
    rank = Rank()
    for _ in range(2):
        rank.run(False, 10000, 100)
    assert rank.gain_us(PREFILL_ROWS) == -200, "100 us to hide, 3 % of 10 ms to pay"


def test_a_slow_first_pass_does_not_count() -> None:
    rank = Rank()
    rank.run(True, 900_000)
    rank.run(True, 6000)
    for _ in range(2):
        rank.run(False, 6000, 2000)
    assert rank.gain_us(PREFILL_ROWS) == 2000


def test_replayed_steps_are_compared_as_a_whole() -> None:
    rank = Rank()
    for _ in range(2):
        rank.run(False, 100, bucket=32)
        rank.run(True, 160, bucket=32)
    assert rank.gain_us(32, ForwardMode.DECODE) == -60


def test_a_pass_may_end_after_the_next_one_was_begun() -> None:
    rank = Rank()
    for overlaps in (False, True, False, True, False):
        rank.gain_us(PREFILL_ROWS)
        compute_us, communication_us = (7000, 500) if overlaps else (8000, 1000)
        agreed = rank.begin(Took(overlaps=overlaps, compute_us=compute_us, communication_us=communication_us))
        if rank.step > 1:
            rank.timeline.end_pass()
        rank.gate.after_step(agreed)
    assert rank.gain_us(PREFILL_ROWS) == 1500


def test_stages_are_timed_while_the_gain_is_open_and_only_of_steps_that_may_overlap() -> None:
    rank = Rank()
    rank.gain_us(PREFILL_ROWS)
    assert rank.timeline.times_next
    rank.gain_us(100)
    assert not rank.timeline.times_next
    for _ in range(2):
        rank.run(False, 6000, 4000)
        rank.run(True, 7000, 1000)
    rank.gain_us(PREFILL_ROWS)
    assert not rank.timeline.times_next


def test_steps_are_counted_by_reason_for_the_metrics() -> None:
    rank = Rank()
    rank.run(False, 1, bucket=8)
    rank.run(False, 1, bucket=8)
    rank.run(True, 1, bucket=8)
    assert rank.gate.gauges == {"overlap_off_probe_steps": 2.0, "overlap_on_steps": 1.0}
    assert not rank.gate.is_busy


def test_a_step_without_rows_teaches_nothing() -> None:
    rank = Rank()
    plan = rank.begin(Took(overlaps=False, compute_us=1, bucket=8)).plan
    rank.timeline.end_pass()
    idle = attrs.evolve(plan, live_tokens=(0, 0))
    rank.gate.after_step(AgreedStep(plan=idle, records=(StepRecord(), StepRecord())))
    assert rank.gate.gauges == {}
    assert rank.gain_us(8, ForwardMode.DECODE) == 0
