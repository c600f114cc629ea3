"""One replica's part in the decision to overlap: whether and where its rows can be cut, and what it has measured."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from crossdock.engine_seams import AgreedStep
from crossdock.observe.span_shares import span_shares
from crossdock.observe.timeline import TimedPass, Timeline
from crossdock.overlap_trial import OverlapTrial
from crossdock.split_point import split_point
from crossdock.types.step import ForwardMode, StepPlan, StepRecord, TrialWay
from crossdock.types.strategy import OverlapLimits


def with_vote(record: StepRecord, query_lens: Sequence[int], limits: OverlapLimits) -> StepRecord:
    """The record of a replica with these sequences, with its vote and the rows of its first micro-batch."""
    mode = ForwardMode(record.local_forward_mode)
    point = split_point(mode, query_lens, limits.balance_threshold)
    return attrs.evolve(
        record, local_can_run_overlap=int(point is not None), overlap_rows=0 if point is None else point.rows
    )


@attrs.define(kw_only=True, eq=False)
class OverlapGate:
    """Votes before a step and learns after it. Steps are told apart by mode and by size, four sizes for each power of two.

    While nothing is open it times nothing: a step that does not overlap is one of ``sequential``.
    """

    limits: OverlapLimits
    timeline: Timeline
    gauges: dict[str, float]
    """Numbers for ``/metrics``; this object writes the ``overlap_*`` ones."""
    _trials: dict[tuple[ForwardMode, int], OverlapTrial] = attrs.field(
        factory=dict[tuple[ForwardMode, int], OverlapTrial], init=False
    )
    _running: dict[int, AgreedStep] = attrs.field(factory=dict[int, AgreedStep], init=False)
    """Steps whose pass has not ended."""

    @property
    def is_busy(self) -> bool:
        return False

    def vote(self, record: StepRecord, query_lens: Sequence[int]) -> StepRecord:
        """The replica's record with its vote, cut, predicted gain, and the way in which the step should run to learn more."""
        voted = with_vote(record, query_lens, self.limits)
        self.timeline.times_next = self.timeline.times_next_pass = False
        if not self._may_overlap(voted):
            return attrs.evolve(voted, overlap_gain_us=0, overlap_trial=int(TrialWay.NONE))
        trial = self._trials.setdefault(_kind(record), OverlapTrial())
        self.timeline.times_next, way = trial.is_looking, trial.ask()
        self.timeline.times_next_pass = way is not TrialWay.NONE
        gain_us = 0
        if trial.gain_share is not None:
            gain_s = trial.gain_share * trial.row_s * record.num_tokens
            gain_us = round(gain_s * 1e6) or (1 if gain_s > 0 else -1)
        return attrs.evolve(voted, overlap_gain_us=gain_us, overlap_trial=int(way))

    def _may_overlap(self, voted: StepRecord) -> bool:
        """The gate will want to know what such a step takes."""
        is_decode = voted.local_forward_mode == ForwardMode.DECODE
        smallest = self.limits.min_decode_rows if is_decode else self.limits.min_prefill_rows
        is_large = voted.num_tokens >= max(smallest, 1)
        return self.limits.is_gated and is_large and bool(voted.local_can_run_overlap)

    def after_step(self, agreed: AgreedStep) -> None:
        """Notes a step, and learns from the pass that ended last: all ranks of a step waited for one another."""
        if agreed.has_rows:
            self._count(agreed.plan)
            self._running[agreed.plan.step] = agreed
        done = self.timeline.last_pass
        if done is None or done.step not in self._running:
            return
        ended = self._running[done.step]
        self._running = {step: running for step, running in self._running.items() if step > done.step}
        if done.is_timed:
            self._learn(ended, done)

    def _learn(self, ended: AgreedStep, done: TimedPass) -> None:
        """Passes are compared as a whole: cutting and joining batches counts, too."""
        shares = span_shares(done.spans)
        exposed_share = shares.exposed_us / shares.wall_us if shares.wall_us else None
        rows = max(ended.plan.live_tokens)
        for kind in {_kind(record) for record in ended.records if record.num_tokens == rows}:
            trial = self._trials.setdefault(kind, OverlapTrial())
            trial.learn(done.seconds() / rows, exposed_share, is_overlapped=ended.plan.overlap)

    def _count(self, plan: StepPlan) -> None:
        name = "overlap_on_steps" if plan.overlap else f"overlap_off_{plan.overlap_reason}_steps"
        self.gauges[name] = self.gauges.get(name, 0.0) + 1.0
        self.gauges.update(self.timeline.shares())


def _kind(record: StepRecord) -> tuple[ForwardMode, int]:
    """Mode and size: the power of two, and the two digits below its first."""
    rows = record.num_tokens
    return ForwardMode(record.local_forward_mode), 4 * rows.bit_length() + (
        (rows << 2 >> rows.bit_length() - 1) & 3 if rows else 0
    )
