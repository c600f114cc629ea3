"""When each operation of a forward pass ran on this rank: timed always for one pass in ``SAMPLE_EVERY``, for each pass while profiling.

A mark is the host's clock on a CPU and an event in the stream on a GPU, read when the pass is over: nobody waits for a device in a pass.
"""

from __future__ import annotations

import time
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


class CudaClock:
    """Events in the current stream, set on the host's clock by the moment at which the first one was recorded."""

    def mark(self) -> tuple[Any, int]:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event, time.perf_counter_ns()

    def read_us(self, marks: Sequence[tuple[Any, int]]) -> list[float]:
        first, host_ns = marks[0]
        marks[-1][0].synchronize()
        return [host_ns / 1e3 + 1e3 * first.elapsed_time(event) for event, _ in marks]


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
class Timeline:
    """The passes of one rank."""

    rank: int
    clock: Clock = attrs.field(factory=HostClock)
    last_pass_s: float = attrs.field(default=0.0, init=False)
    """Of the last pass, from its launch to its result on the host."""
    last_spans: tuple[Span, ...] = attrs.field(default=(), init=False)
    """Of the last pass, where it was timed."""
    _profile: list[Span] | None = attrs.field(default=None, init=False)
    _marks: PassMarks | None = attrs.field(default=None, init=False)
    _begun_s: float = attrs.field(default=0.0, init=False)
    _sampled: SpanShares | None = attrs.field(default=None, init=False)

    @property
    def is_profiling(self) -> bool:
        return self._profile is not None

    def start_profile(self) -> None:
        """From the next pass on every operation is kept; what an earlier profile kept is forgotten."""
        self._profile = []

    def stop_profile(self) -> tuple[Span, ...]:
        """What was kept."""
        kept, self._profile = self._profile or [], None
        return tuple(kept)

    def begin_pass(self, step: int) -> PassMarks | None:
        """Where the executor puts its marks; None when this pass is not timed."""
        self._begun_s = time.perf_counter()
        is_timed = step % SAMPLE_EVERY == 0 or (self._profile is not None and len(self._profile) < MOST_SPANS)
        self._marks = PassMarks(step, self.clock) if is_timed else None
        return self._marks

    def end_pass(self) -> None:
        """The results of the pass are there."""
        self.last_pass_s = time.perf_counter() - self._begun_s
        self.last_spans = () if self._marks is None else self._marks.spans()
        self._marks = None
        if self.last_spans:
            self._sampled = span_shares(self.last_spans)
            if self._profile is not None:
                self._profile.extend(self.last_spans)

    def shares(self) -> dict[str, float]:
        """Numbers of the last timed pass, by name."""
        return {} if self._sampled is None else self._sampled.gauges()
