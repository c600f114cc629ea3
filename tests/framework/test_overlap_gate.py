"""A replica's vote, and what it learns from the steps that ran."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy

import attrs
from crossdock.engine_seams import AgreedStep
from crossdock.observe.timeline import SAMPLE_EVERY, Timeline
from crossdock.overlap_decision import OverlapRules, decide_overlap
from crossdock.overlap_gate import OverlapGate, with_vote
from crossdock.overlap_trial import LOOKS, MOST_PAIRS
from crossdock.types.model import Op, OpKind
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan, StepRecord, TrialWay
from crossdock.types.strategy import OverlapLimits

LIMITS = OverlapLimits(min_decode_rows=4)
PREFILL_ROWS = 1000


class SetClock:
    """Shows what it is told, and counts how often it was looked at."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self.marks = 0

    def mark(self) -> float:
        self.marks += 1
        return self.now_us

    def read_us(self, marks: Sequence[float]) -> list[float]:
        return list(marks)


class Rank:
    """A busy replica beside an idle one. What its gate asks for, or the decision says, is what runs.

    Args:
        bucket: rows of decode steps that are replayed; None for prompt rows that run eager.
        communication_share: of a pass.
        depth: passes that have not ended when the next one is voted on.
    """

    def __init__(self, *, bucket: int | None = None, communication_share: float = 0.4, depth: int = 0) -> None:
        self.clock = SetClock()
        self.timeline = Timeline(rank=0, clock=self.clock)
        self.gate = OverlapGate(limits=LIMITS, timeline=self.timeline, gauges={})
        self.bucket, self.share, self.depth = bucket, communication_share, depth
        self.rows = bucket or PREFILL_ROWS
        self.mode = ForwardMode.DECODE if bucket else ForwardMode.PREFILL
        self.step = 1
        self.open: list[AgreedStep] = []

    def gain_us(self, rows: int, mode: ForwardMode = ForwardMode.PREFILL) -> int:
        """What such a step would be predicted to gain; nothing changes."""
        return deepcopy(self.gate).vote(record(rows, mode), [rows - rows // 2, rows // 2]).overlap_gain_us

    def run(self, sequential_us: float, overlapped_us: float) -> bool:
        """A pass from vote to result, and whether it overlapped."""
        # Not a step whose operations are timed anyway.
        self.step += SAMPLE_EVERY
        voted = self.gate.vote(record(self.rows, self.mode), [self.rows - self.rows // 2, self.rows // 2])
        rules = OverlapRules(limits=LIMITS, captured_rows=() if self.bucket is None else (self.bucket,))
        overlaps, reason = decide_overlap((voted, StepRecord()), DispatchMode.NORMAL, rules, self.bucket)
        self._pass(overlapped_us if overlaps else sequential_us)
        self.open.append(AgreedStep(plan=self.plan(overlaps, reason), records=(voted, StepRecord())))
        while len(self.open) > self.depth:
            self.timeline.end_pass()
            self.gate.after_step(self.open.pop(0))
        return overlaps

    def plan(self, overlaps: bool, reason: str) -> StepPlan:
        return StepPlan(
            step=self.step,
            eplb_pass=1,
            live_tokens=(self.rows, 0),
            padded_tokens=(self.rows, 0),
            padding_mode=PaddingMode.SUM_LEN,
            forward_mode=self.mode,
            dispatch_mode=DispatchMode.NORMAL,
            overlap=overlaps,
            overlap_reason=reason,
            bucket=self.bucket,
        )

    def _pass(self, took_us: float) -> None:
        marks = self.timeline.begin_pass(self.step)
        if marks is None or self.bucket is not None:
            self.clock.now_us += took_us
        else:
            marks.begin()
            half = self.share / 2
            for kind, share in (
                (OpKind.EXPERTS, 1 - self.share),
                (OpKind.DISPATCH_BEGIN, half),
                (OpKind.DISPATCH_END, half),
            ):
                self.clock.now_us += share * took_us
                marks.op_ended(0, Op(name=kind.value, kind=kind, layer=0, fn=lambda context: None))
        self.timeline.pass_launched()


def record(rows: int, mode: ForwardMode = ForwardMode.DECODE) -> StepRecord:
    return StepRecord(num_tokens=rows, local_forward_mode=int(mode))


def test_rows_that_can_be_cut_are_a_yes_with_the_size_of_the_first_part() -> None:
    voted = with_vote(record(960, ForwardMode.PREFILL), [10, 900, 20, 30], LIMITS)
    assert (voted.local_can_run_overlap, voted.overlap_rows) == (1, 480)


def test_one_row_is_a_no_and_no_row_is_a_yes() -> None:
    assert with_vote(record(1), [1], LIMITS).local_can_run_overlap == 0
    idle = with_vote(record(0, ForwardMode.IDLE), [], LIMITS)
    assert (idle.local_can_run_overlap, idle.overlap_rows) == (1, 0)


def test_a_gain_is_predicted_after_two_pairs_for_steps_of_that_mode_and_size() -> None:
    rank = Rank()
    for _ in range(LOOKS + 3):
        assert rank.gain_us(PREFILL_ROWS) == 0
        rank.run(10_000, 8000)
    assert rank.gain_us(PREFILL_ROWS) == 0, "the second pair is half done"
    rank.run(10_000, 8000)
    assert rank.gain_us(PREFILL_ROWS) == 2000
    assert rank.gain_us(900) == 1800, "nearly as large"
    assert rank.gain_us(700) == rank.gain_us(2 * PREFILL_ROWS) == 0, "another size"
    assert rank.gain_us(PREFILL_ROWS, ForwardMode.DECODE) == 0, "another mode"


def test_steps_run_as_the_trial_asks_and_then_as_it_fell_out() -> None:
    for overlapped_us, last in ((8000, True), (12_000, False)):
        rank = Rank()
        ways = [rank.run(10_000, overlapped_us) for _ in range(LOOKS + 6)]
        assert ways == [False] * LOOKS + [True, False, False, True, last, last]


def test_a_loss_is_predicted_as_one() -> None:
    rank = Rank()
    for _ in range(LOOKS + 4):
        rank.run(10_000, 13_000)
    assert rank.gain_us(PREFILL_ROWS) == -3000


def test_where_next_to_nothing_can_be_hidden_overlap_is_not_even_tried() -> None:
    rank = Rank(communication_share=0.01)
    assert not any(rank.run(10_000, 9000) for _ in range(20))
    assert rank.gain_us(PREFILL_ROWS) == -197, "100 us to hide, 3 % of 9,900 to pay"


def test_replayed_steps_are_compared_as_a_whole() -> None:
    rank = Rank(bucket=32)
    assert [rank.run(100, 160) for _ in range(LOOKS + 6)].count(True) == 2
    assert rank.gain_us(32, ForwardMode.DECODE) == -60


def test_a_pass_may_end_after_the_next_one_was_begun() -> None:
    """At depth 1 what a vote can know is one step older."""
    rank = Rank(depth=1)
    ways = [rank.run(10_000, 8000) for _ in range(LOOKS + 9)]
    assert rank.gain_us(PREFILL_ROWS) == 2000
    assert ways[-2:] == [True, True]
    assert ways.count(False) <= LOOKS + 4


def test_operations_are_timed_at_first_then_passes_as_a_whole_and_nothing_once_the_verdict_is_known() -> None:
    rank = Rank()
    marks = [0]
    for _ in range(LOOKS + 6):
        rank.run(10_000, 12_000)
        marks.append(rank.clock.marks)
    # Begin and end of the pass; with operations also their begin, and an end of each of the three.
    assert [after - before for before, after in itertools.pairwise(marks)] == [6] * LOOKS + [2] * 4 + [0] * 2


def test_steps_that_cannot_overlap_and_gates_that_always_say_yes_time_nothing() -> None:
    rank = Rank()
    always = OverlapGate(limits=attrs.evolve(LIMITS, is_gated=False), timeline=rank.timeline, gauges={})
    for gate, rows, lengths in (
        (rank.gate, 100, [50, 50]),
        (rank.gate, 1, [1]),
        (always, PREFILL_ROWS, [500, 500]),
    ):
        rank.timeline.times_next = rank.timeline.times_next_pass = True
        voted = gate.vote(record(rows, ForwardMode.PREFILL), lengths)
        assert (voted.overlap_trial, voted.overlap_gain_us) == (TrialWay.NONE, 0)
        assert not rank.timeline.times_next
        assert not rank.timeline.times_next_pass


def test_steps_are_counted_by_reason_for_the_metrics() -> None:
    rank = Rank(bucket=8)
    for _ in range(LOOKS + 5):
        rank.run(100, 150)
    assert rank.gate.gauges == {
        "overlap_off_probe_steps": LOOKS + 2.0,
        "overlap_on_steps": 2.0,
        "overlap_off_no_gain_steps": 1.0,
    }
    assert not rank.gate.is_busy


def test_a_step_without_rows_teaches_nothing() -> None:
    rank = Rank(bucket=8)
    rank.timeline.times_next_pass = True
    rank._pass(1.0)
    rank.timeline.end_pass()
    idle = attrs.evolve(rank.plan(False, "all_idle"), live_tokens=(0, 0))
    rank.gate.after_step(AgreedStep(plan=idle, records=(StepRecord(), StepRecord())))
    assert rank.gate.gauges == {}
    assert rank.gain_us(8, ForwardMode.DECODE) == 0


def test_two_replicas_of_one_size_ask_for_the_same_ways_whatever_each_of_them_measured() -> None:
    """Their clocks differ by a few per cent: a step never runs in two ways, because one decision is made of both records."""
    ranks = [Rank(), Rank()]
    reasons = Counter[str]()
    for step in range(40):
        votes = []
        for rank in ranks:
            rank.step += SAMPLE_EVERY
            votes.append(rank.gate.vote(record(PREFILL_ROWS, ForwardMode.PREFILL), [500, 500]))
        decisions = {decide_overlap(votes, DispatchMode.NORMAL, OverlapRules(limits=LIMITS)) for _ in ranks}
        ((overlaps, reason),) = decisions
        reasons[reason] += 1
        for place, rank in enumerate(ranks):
            took_us = (9950 if overlaps else 10_000) * (1 + 0.02 * (step * 7 + place * 3 % 5) / 40)
            rank._pass(took_us)
            rank.timeline.end_pass()
            rank.gate.after_step(AgreedStep(plan=rank.plan(overlaps, reason), records=tuple(votes)))
    assert set(reasons) <= {"", "probe", "no_gain"}
    assert reasons["probe"] <= LOOKS + MOST_PAIRS
