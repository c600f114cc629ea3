"""One replica's part in the decision to overlap: whether and where its rows can be cut, and what it has measured."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from crossdock.engine_seams import AgreedStep
from crossdock.observe.span_shares import span_shares
from crossdock.observe.timeline import TimedPass, Timeline
from crossdock.split_point import split_point
from crossdock.types.step import ForwardMode, StepPlan, StepRecord
from crossdock.types.strategy import OverlapLimits

SMOOTHING = 0.5
"""Weight of the newest pass in an average; once both ways are known only few of them are timed."""
TRIES = 2
"""Passes of either kind before they are compared. The better one counts: the first may have loaded kernels."""
PRICE = 0.03
"""Share of the computing time that two half batches cost more than a whole one, at the least (7 % was seen with 16,384 tokens, 15 % with 4,096, on two
H200s): where less communication than that is exposed, overlap is not even tried."""


def with_vote(record: StepRecord, query_lens: Sequence[int], limits: OverlapLimits) -> StepRecord:
    """The record of a replica with these sequences, with its vote and the rows of its first micro-batch."""
    mode = ForwardMode(record.local_forward_mode)
    point = split_point(mode, query_lens, limits.balance_threshold)
    return attrs.evolve(
        record, local_can_run_overlap=int(point is not None), overlap_rows=0 if point is None else point.rows
    )


@attrs.define
class PassTime:
    """Seconds per row of passes of one kind and size."""

    passes: int = 0
    total_s: float = 0.0
    exposed_s: float | None = None
    """Communication in it; None where its operations were not timed, as in a replayed graph."""

    def add(self, total_s: float, exposed_s: float | None) -> None:
        """Takes in a pass."""
        self.passes += 1
        if self.passes <= TRIES:
            is_better = self.passes == 1 or total_s < self.total_s
            self.total_s, self.exposed_s = (total_s, exposed_s) if is_better else (self.total_s, self.exposed_s)
            return
        self.total_s += SMOOTHING * (total_s - self.total_s)
        if exposed_s is not None:
            self.exposed_s = exposed_s

    @property
    def is_known(self) -> bool:
        return self.passes >= TRIES


@attrs.define
class StepTimes:
    """Passes of one mode and size, in one micro-batch and in two."""

    sequential: PassTime = attrs.field(factory=PassTime)
    overlapped: PassTime = attrs.field(factory=PassTime)

    @property
    def gain_s(self) -> float | None:
        """What two micro-batches save a row, by the times of the stages; None while that is open."""
        sequential, overlapped = self.sequential, self.overlapped
        if not sequential.is_known:
            return None
        if overlapped.is_known:
            return sequential.total_s - overlapped.total_s
        if sequential.exposed_s is None:
            return None
        most_s = sequential.exposed_s - PRICE * (sequential.total_s - sequential.exposed_s)
        return most_s if most_s < 0 else None


@attrs.define(kw_only=True, eq=False)
class OverlapGate:
    """Votes before a step and learns after it. Steps are told apart by mode and by the power of two above their rows."""

    limits: OverlapLimits
    timeline: Timeline
    gauges: dict[str, float]
    """Numbers for ``/metrics``; this object writes the ``overlap_*`` ones."""
    _times: dict[tuple[ForwardMode, int], StepTimes] = attrs.field(
        factory=dict[tuple[ForwardMode, int], StepTimes], init=False
    )
    _running: dict[int, AgreedStep] = attrs.field(factory=dict[int, AgreedStep], init=False)
    """Steps whose pass has not ended."""

    def __attrs_post_init__(self) -> None:
        self.timeline.times_passes = True

    @property
    def is_busy(self) -> bool:
        return False

    def vote(self, record: StepRecord, query_lens: Sequence[int]) -> StepRecord:
        """The replica's record with its vote, cut and predicted gain."""
        voted = with_vote(record, query_lens, self.limits)
        times = self._times.get(_kind(record))
        gain_s = None if times is None else times.gain_s
        if gain_s is None:
            self.timeline.times_next = self._may_overlap(voted)
            return attrs.evolve(voted, overlap_gain_us=0)
        gain_us = round(gain_s * record.num_tokens * 1e6)
        return attrs.evolve(voted, overlap_gain_us=gain_us or (1 if gain_s > 0 else -1))

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
        self._learn(ended, done)

    def _learn(self, ended: AgreedStep, done: TimedPass) -> None:
        """Eager passes are compared by the stages that were timed, replayed ones as a whole."""
        if done.spans:
            shares = span_shares(done.spans)
            total_s, exposed_s = shares.wall_us / 1e6, shares.exposed_us / 1e6
        elif ended.plan.bucket is not None:
            total_s, exposed_s = done.seconds(), None
        else:
            return
        rows = max(ended.plan.live_tokens)
        for kind in {_kind(record) for record in ended.records if record.num_tokens == rows}:
            times = self._times.setdefault(kind, StepTimes())
            passes = times.overlapped if ended.plan.overlap else times.sequential
            passes.add(total_s / rows, None if exposed_s is None else exposed_s / rows)

    def _count(self, plan: StepPlan) -> None:
        name = "overlap_on_steps" if plan.overlap else f"overlap_off_{plan.overlap_reason}_steps"
        self.gauges[name] = self.gauges.get(name, 0.0) + 1.0
        self.gauges.update(self.timeline.shares())


def _kind(record: StepRecord) -> tuple[ForwardMode, int]:
    return ForwardMode(record.local_forward_mode), record.num_tokens.bit_length()
