"""When each operation of a forward pass ran on this rank: timed always for one pass in ``SAMPLE_EVERY``, for each pass while profiling.

A mark is the host's clock on a CPU and an event in the stream on a GPU, read when the pass is over: nobody waits for a device in a pass.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from crossdock.observe.span_shares import SpanShares, span_shares
from crossdock.types.model import OpKind
from crossdock.types.observer import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from crossdock.types.model import Op

SAMPLE_EVERY = 16
MOST_SPANS = 500_000
"""A profile keeps no more: about 100 MB."""
CATEGORIES = {
    OpKind.ATTN_PREPARE: "attention",
    OpKind.ATTN_CORE: "attention",
    OpKind.BOUNDARY: "boundary",
    OpKind.ROUTE: "route",
    OpKind.DISPATCH_BEGIN: "dispatch",
    OpKind.DISPATCH_END: "wait",
    OpKind.EXPERTS: "experts",
    OpKind.COMBINE_BEGIN: "combine",
    OpKind.COMBINE_END: "wait",
    OpKind.SHARED: "dense",
    OpKind.DENSE: "dense",
}
"""Of an operation's kind; the others are ``other``."""


class Clock(Protocol):
    """Marks moments without waiting."""

    def mark(self) -> Any: ...

    def read_us(self, marks: Sequence[Any]) -> list[float]:
        """The moments, once all of them have passed; waits for the last one."""
        ...


class HostClock:
    """The monotonic clock that the processes of a machine share."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def read_us(self, marks: Sequence[int]) -> list[float]:
        return [mark / 1e3 for mark in marks]


ANCHOR_EVERY_NS = 2_000_000_000
"""Times between events are float32: 0.2 us are lost after so long."""


class CudaClock:
    """Events in the current stream. They are set on the host's clock by an event in a stream that has nothing else to do, because the host may be
    far ahead of the device when a mark is issued. Nobody waits for that event: it is older than the marks."""

    def __init__(self) -> None:
        self._idle: Any = None
        self._anchor: tuple[Any, int] = (None, -ANCHOR_EVERY_NS)
        """An event, and when it was recorded."""

    def mark(self) -> tuple[Any, tuple[Any, int]]:
        import torch

        if time.perf_counter_ns() - self._anchor[1] >= ANCHOR_EVERY_NS:
            self._idle = self._idle or torch.cuda.Stream()
            anchor = torch.cuda.Event(enable_timing=True)
            anchor.record(self._idle)
            self._anchor = (anchor, time.perf_counter_ns())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event, self._anchor

    def read_us(self, marks: Sequence[tuple[Any, tuple[Any, int]]]) -> list[float]:
        marks[-1][0].synchronize()
        # One anchor for all of them: two would differ by microseconds.
        anchor, recorded_ns = marks[0][1]
        return [recorded_ns / 1e3 + 1e3 * anchor.elapsed_time(event) for event, _ in marks]


def clock_of(device: torch.device) -> Clock:
    """The clock for what runs on a device."""
    return CudaClock() if device.type == "cuda" else HostClock()


@attrs.define(eq=False)
class PassMarks:
    """Moments of one pass, operation by operation."""

    step: int
    clock: Clock
    _ended: list[tuple[int, Op]] = attrs.field(factory=list["tuple[int, Op]"], init=False)
    _marks: list[Any] = attrs.field(factory=list[Any], init=False)
    _beside: list[tuple[int, Op]] = attrs.field(factory=list["tuple[int, Op]"], init=False)
    _beside_marks: list[Any] = attrs.field(factory=list[Any], init=False)

    def begin(self) -> None:
        """The first operation starts now."""
        self._marks.append(self.clock.mark())

    def op_ended(self, micro_batch: int, op: Op) -> None:
        """``op`` ran since the mark before."""
        self._ended.append((micro_batch, op))
        self._marks.append(self.clock.mark())

    def ran_beside(self, micro_batch: int, op: Op, begun: Any, ended: Any) -> None:
        """``op`` ran in another stream between two marks of it; the pass has waited for the end."""
        self._beside.append((micro_batch, op))
        self._beside_marks += (begun, ended)

    def spans(self) -> tuple[Span, ...]:
        """In running order, then those that ran beside; none when no operation was run one by one."""
        if not self._ended:
            return ()
        # The last mark of the pass is the last to come.
        count = len(self._marks)
        moments = self.clock.read_us([self._marks[0], *self._beside_marks, *self._marks[1:]])
        beside, moments = moments[1 : len(self._beside_marks) + 1], [moments[0], *moments[1 - count :]]
        return (
            *(self._span(*run, *moments[i : i + 2], is_beside=False) for i, run in enumerate(self._ended)),
            *(self._span(*run, *beside[2 * i : 2 * i + 2], is_beside=True) for i, run in enumerate(self._beside)),
        )

    def _span(self, micro_batch: int, op: Op, begun_us: float, ended_us: float, *, is_beside: bool) -> Span:
        return Span(
            step=self.step,
            micro_batch=micro_batch,
            layer=op.layer,
            name=op.name,
            category=CATEGORIES.get(op.kind, "other"),
            begin_us=begun_us,
            duration_us=ended_us - begun_us,
            is_beside=is_beside,
        )


@attrs.define(kw_only=True, eq=False)
class TimedPass:
    """One forward pass: its own two moments and those of its operations, where they are timed."""

    step: int
    clock: Clock
    marks: PassMarks | None
    begun: Any = None
    ended: Any = None
    spans: tuple[Span, ...] = ()
    """Of its operations, once it is over."""

    @property
    def is_timed(self) -> bool:
        """As a whole."""
        return self.begun is not None

    def seconds(self) -> float:
        """From its first operation to its last, where it ``is_timed``. Waits for the last one."""
        begun_us, ended_us = self.clock.read_us([self.begun, self.ended])
        return (ended_us - begun_us) / 1e6


@attrs.define(kw_only=True, eq=False)
class Timeline:
    """The passes of one rank. They end in the order in which they were begun; a second one may begin before the first one ends."""

    rank: int
    clock: Clock = attrs.field(factory=HostClock)
    times_passes: bool = False
    """Every pass is timed as a whole, replayed ones too."""
    times_next: bool = attrs.field(default=False, init=False)
    """Set to time the operations of the next pass, whatever its number."""
    times_next_pass: bool = attrs.field(default=False, init=False)
    """Set to time the next pass as a whole."""
    last_pass: TimedPass | None = attrs.field(default=None, init=False)
    """The last one that ended."""
    _profile: list[Span] | None = attrs.field(default=None, init=False)
    _open: deque[TimedPass] = attrs.field(factory=deque[TimedPass], init=False)
    _sampled: SpanShares | None = attrs.field(default=None, init=False)

    @property
    def is_profiling(self) -> bool:
        return self._profile is not None

    @property
    def last_spans(self) -> tuple[Span, ...]:
        """Of the last pass that ended, where its operations were timed."""
        return () if self.last_pass is None else self.last_pass.spans

    def start_profile(self) -> None:
        """From the next pass on every operation is kept; what an earlier profile kept is forgotten."""
        self._profile = []

    def stop_profile(self) -> tuple[Span, ...]:
        """What was kept."""
        kept, self._profile = self._profile or [], None
        return tuple(kept)

    def begin_pass(self, step: int) -> PassMarks | None:
        """Where the executor puts its marks; None when the operations of this pass are not timed."""
        is_kept = self._profile is not None and len(self._profile) < MOST_SPANS
        marks = PassMarks(step, self.clock) if step % SAMPLE_EVERY == 0 or is_kept or self.times_next else None
        begun = self.clock.mark() if self.times_passes or self.times_next_pass else None
        self.times_next = self.times_next_pass = False
        self._open.append(TimedPass(step=step, clock=self.clock, marks=marks, begun=begun))
        return marks

    def pass_launched(self) -> None:
        """The operations of the pass that was begun last have been issued."""
        if self._open[-1].is_timed:
            self._open[-1].ended = self.clock.mark()

    def end_pass(self) -> None:
        """The results of the oldest pass are there."""
        self.last_pass = done = self._open.popleft()
        if done.marks is not None:
            done.spans = done.marks.spans()
        if done.spans:
            self._sampled = span_shares(done.spans)
            if self._profile is not None:
                self._profile.extend(done.spans)

    def shares(self) -> dict[str, float]:
        """Numbers of the last pass whose operations were timed, by name."""
        return {} if self._sampled is None else self._sampled.gauges()
