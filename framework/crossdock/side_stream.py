"""Runs chosen operations of a forward pass in a second stream: from the moment at which the transfer before them begins until somebody takes
what they write.

Tensors need no bookkeeping with the allocator. What such an operation reads is held until the main stream has waited for it. What it writes
lies in memory of the second stream, which is used again only behind the main stream's operation that took it. Everything is ordered by events of
this pass, so that it can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import torch

from crossdock.types.model import OpKind

if TYPE_CHECKING:
    from crossdock.observe.timeline import PassMarks
    from crossdock.types.model import ForwardContext, Op
    from crossdock.types.strategy import StagePlan


_BEGINS = (OpKind.DISPATCH_BEGIN, OpKind.COMBINE_BEGIN)


class StreamPair(Protocol):
    """The main stream, to which operations are issued, and a second one. A ticket is a moment in either."""

    def mark(self) -> Any:
        """Now, in the main stream."""
        ...

    def wait(self, ticket: Any) -> None:
        """What is issued to the main stream from now on comes after the ticket."""
        ...

    def run(self, compute: Callable[[], Any], after: Sequence[Any]) -> tuple[Any, Any]:
        """Issues ``compute()`` to the second stream, after the tickets. Returns its result and the ticket of its end."""
        ...


class CudaStreams:
    """Of one GPU; tickets are events."""

    def __init__(self, device: torch.device) -> None:
        self._second = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, ticket: Any) -> None:
        torch.cuda.current_stream().wait_event(ticket)

    def run(self, compute: Callable[[], Any], after: Sequence[Any]) -> tuple[Any, Any]:
        for ticket in after:
            self._second.wait_event(ticket)
        with torch.cuda.stream(self._second):
            return compute(), self.mark()


@attrs.frozen(kw_only=True, eq=False)
class _Running:
    """An operation that the main stream has not waited for."""

    ticket: Any
    held: tuple[Any, ...]
    """What it reads."""


@attrs.define(kw_only=True, eq=False)
class SidePass:
    """One forward pass whose plan has operations beside the others."""

    streams: StreamPair
    kinds: frozenset[OpKind]
    inputs: frozenset[str]
    """Keys that such operations read."""
    marks: PassMarks | None = None
    _started: dict[int, Any] = attrs.field(factory=dict[int, Any], init=False)
    """When a micro-batch's last transfer began, if no input was written since."""
    _running: dict[tuple[int, str], _Running] = attrs.field(factory=dict["tuple[int, str]", _Running], init=False)
    _taken: Any = attrs.field(default=None, init=False)
    """When the main stream last took something that the second one wrote."""

    def run(self, micro_batch: int, op: Op, context: ForwardContext, values: Sequence[Any]) -> Any:
        """The result of an operation, in the stream where it belongs."""
        if op.kind in self.kinds:
            return self._run_beside(micro_batch, op, context, values)
        joined = [self._join(micro_batch, key) for key in (*op.reads, *op.keeps)]
        if op.kind in _BEGINS:
            self._started[micro_batch] = self.streams.mark()
        result = op.fn(context, *values)
        if any(joined):
            self._taken = self.streams.mark()
        if not self.inputs.isdisjoint(op.writes):
            self._started.pop(micro_batch, None)
        return result

    def finish(self) -> None:
        """Waits for whatever nobody took."""
        for micro_batch, key in list(self._running):
            self._join(micro_batch, key)

    def _run_beside(self, micro_batch: int, op: Op, context: ForwardContext, values: Sequence[Any]) -> Any:
        start = self._started.get(micro_batch)
        after = [self.streams.mark() if start is None else start]
        if self._taken is not None:
            after.append(self._taken)
        result, ticket = self.streams.run(lambda: self._compute(micro_batch, op, context, values), after)
        running = _Running(ticket=ticket, held=tuple(values))
        self._running |= {(micro_batch, key): running for key in op.writes}
        return result

    def _join(self, micro_batch: int, key: str) -> bool:
        running = self._running.pop((micro_batch, key), None)
        if running is None:
            return False
        self.streams.wait(running.ticket)
        return True

    def _compute(self, micro_batch: int, op: Op, context: ForwardContext, values: Sequence[Any]) -> Any:
        if self.marks is None:
            return op.fn(context, *values)
        begun = self.marks.clock.mark()
        result = op.fn(context, *values)
        self.marks.ran_beside(micro_batch, op, begun, self.marks.clock.mark())
        return result


def side_inputs(plan: StagePlan) -> frozenset[str]:
    """Keys that the operations beside the others read."""
    beside = [op for stage in plan.stages for op in stage if op.kind in plan.beside]
    return frozenset(key for op in beside for key in (*op.reads, *op.keeps))
