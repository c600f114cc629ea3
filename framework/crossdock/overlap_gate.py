"""One replica's part in the decision to overlap: whether and where its rows can be cut, and what it has measured."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from crossdock.engine_seams import AgreedStep
from crossdock.observe.timeline import Timeline
from crossdock.split_point import split_point
from crossdock.types.step import ForwardMode, StepPlan, StepRecord
from crossdock.types.strategy import OverlapLimits

SMOOTHING = 0.2
"""Weight of the newest step in an average."""


def with_vote(record: StepRecord, query_lens: Sequence[int], limits: OverlapLimits) -> StepRecord:
    """The record of a replica with these sequences, with its vote and the rows of its first micro-batch."""
    mode = ForwardMode(record.local_forward_mode)
    point = split_point(mode, query_lens, limits.balance_threshold)
    return attrs.evolve(
        record, local_can_run_overlap=int(point is not None), overlap_rows=0 if point is None else point.rows
    )


@attrs.define
class StepTimes:
    """Seconds of a forward pass per row, smoothed, for steps of one kind and size; 0.0 while none was seen."""

    sequential_s: float = 0.0
    overlapped_s: float = 0.0

    def add(self, seconds: float, *, overlaps: bool) -> None:
        known = self.overlapped_s if overlaps else self.sequential_s
        value = seconds if known == 0.0 else known + SMOOTHING * (seconds - known)
        if overlaps:
            self.overlapped_s = value
        else:
            self.sequential_s = value

    @property
    def gain_s(self) -> float:
        """What overlap saves a row; 0.0 until both were measured."""
        return self.sequential_s - self.overlapped_s if self.sequential_s and self.overlapped_s else 0.0


@attrs.define(kw_only=True, eq=False)
class OverlapGate:
    """Votes before a step and learns after it. Steps are told apart by global mode and by the power of two above their rows."""

    limits: OverlapLimits
    timeline: Timeline
    gauges: dict[str, float]
    """Numbers for ``/metrics``; this object writes the ``overlap_*`` ones."""
    _times: dict[tuple[ForwardMode, int], StepTimes] = attrs.field(
        factory=dict[tuple[ForwardMode, int], StepTimes], init=False
    )

    @property
    def is_busy(self) -> bool:
        return False

    def vote(self, record: StepRecord, query_lens: Sequence[int]) -> StepRecord:
        """The replica's record with its vote, cut and predicted gain."""
        voted = with_vote(record, query_lens, self.limits)
        times = self._times.get((ForwardMode(record.local_forward_mode), record.num_tokens.bit_length()))
        gain_s = 0.0 if times is None else times.gain_s * record.num_tokens
        return attrs.evolve(voted, overlap_gain_us=round(gain_s * 1e6))

    def after_step(self, agreed: AgreedStep) -> None:
        """Takes the time of the pass that this rank just ran, by the rows and the mode of each replica: all of them waited for it."""
        if not agreed.has_rows:
            return
        self._count(agreed.plan)
        for record in agreed.records:
            if record.num_tokens:
                key = ForwardMode(record.local_forward_mode), record.num_tokens.bit_length()
                times = self._times.setdefault(key, StepTimes())
                times.add(self.timeline.last_pass_s / record.num_tokens, overlaps=agreed.plan.overlap)

    def _count(self, plan: StepPlan) -> None:
        name = "overlap_on_steps" if plan.overlap else f"overlap_off_{plan.overlap_reason}_steps"
        self.gauges[name] = self.gauges.get(name, 0.0) + 1.0
        self.gauges.update(self.timeline.shares())
