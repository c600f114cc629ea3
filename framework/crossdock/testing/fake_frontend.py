"""A frontend in this process: routes nothing, asks nothing, but speaks to ranks as the real one does. For tests of the engine."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import attrs

from crossdock.groups import leader_ranks
from crossdock.types.link import (
    AbortRequests,
    AddRequests,
    Control,
    ControlReply,
    Incoming,
    Outgoing,
    Outputs,
    Parked,
    Stop,
    Wake,
)
from crossdock.types.parallel import ParallelSizes
from crossdock.types.request import EngineOutput, EngineRequest, ReplicaLoad

PATIENCE_S = 30.0
"""How long a test waits for something that a working engine does in milliseconds."""


@attrs.define(eq=False)
class QueueLink:
    """One rank's ``RankLink``."""

    rank: int
    frontend: FakeFrontend
    inbox: queue.SimpleQueue[Incoming] = attrs.field(factory=queue.SimpleQueue[Incoming], init=False)
    polls: int = attrs.field(default=0, init=False)
    waits: int = attrs.field(default=0, init=False)
    """Polls that waited without a limit, that is parked ones."""

    def poll(self, timeout_s: float | None) -> Sequence[Incoming]:
        self.polls += 1
        messages: list[Incoming] = []
        if timeout_s is None:
            self.waits += 1
            messages.append(self.inbox.get(timeout=PATIENCE_S))
        while not self.inbox.empty():
            messages.append(self.inbox.get())
        return messages

    def send(self, message: Outgoing) -> None:
        self.frontend.receive(self.rank, message)


class FakeFrontend:
    """Talks to every rank of a layout; all methods may be called from any thread."""

    def __init__(self, sizes: ParallelSizes) -> None:
        self._lock = threading.Condition()
        self._leaders = leader_ranks(sizes)
        self.links = [QueueLink(rank, self) for rank in range(sizes.ranks)]
        self.outputs: dict[str, list[EngineOutput]] = {}
        self.loads: list[ReplicaLoad] = []
        self.replies: list[ControlReply] = []
        self.parks: list[Parked] = []
        self._is_over = False
        self._open: set[str] = set()
        self._parked_step = -1
        self._woken_step = -1

    def submit(self, replica: int, *requests: EngineRequest) -> None:
        """Sends requests to a replica and wakes everybody when all are parked."""
        with self._lock:
            self._open |= {request.rid for request in requests}
            self.links[self._leaders[replica]].inbox.put(AddRequests(requests=requests))
            self._wake()

    def abort(self, replica: int, *rids: str) -> None:
        with self._lock:
            self.links[self._leaders[replica]].inbox.put(AbortRequests(rids=rids))

    def control(self, verb: str, call_id: int, **arguments: object) -> None:
        """Sends a verb to every leader, and wakes everybody when all are parked."""
        with self._lock:
            for leader in self._leaders:
                self.links[leader].inbox.put(Control(verb=verb, call_id=call_id, arguments=dict(arguments)))
            self._wake()

    def stop(self) -> None:
        for link in self.links:
            link.inbox.put(Stop())

    def receive(self, rank: int, message: Outgoing) -> None:
        with self._lock:
            match message:
                case Outputs(outputs=outputs, load=load):
                    for output in outputs:
                        self.outputs.setdefault(output.rid, []).append(output)
                        if output.finish_reason is not None:
                            self._open.discard(output.rid)
                    if load is not None:
                        self.loads.append(load)
                case Parked(step=step):
                    self.parks.append(message)
                    self._parked_step = max(self._parked_step, step)
                    if self._open:
                        self._wake()
                case ControlReply():
                    self.replies.append(message)
                case _:
                    pass
            self._lock.notify_all()

    def end(self) -> None:
        """The engine is gone: nobody waits for it any more."""
        with self._lock:
            self._is_over = True
            self._lock.notify_all()

    def wait(self, condition: Callable[[FakeFrontend], bool], what: str) -> None:
        """Until ``condition`` holds; raises ``TimeoutError`` naming ``what`` when it does not, in time or before the engine ends."""
        with self._lock:
            self._lock.wait_for(lambda: self._is_over or condition(self), PATIENCE_S)
            if not condition(self):
                raise TimeoutError(f"the engine did not come to this: {what}")

    def wait_finished(self, *rids: str) -> None:
        self.wait(lambda frontend: not set(rids) & frontend._open, f"{rids} finish")

    def wait_parked(self) -> None:
        """All leaders sleep after the same step."""

        def all_parked(frontend: FakeFrontend) -> bool:
            parked = {park.rank for park in frontend.parks if park.step == frontend._parked_step}
            return frontend._parked_step > frontend._woken_step and parked == set(frontend._leaders)

        self.wait(all_parked, "all replicas park")

    def tokens(self, rid: str) -> list[int]:
        return [token for output in self.outputs.get(rid, []) for token in output.token_ids]

    def finish_reason(self, rid: str) -> str | None:
        return self.outputs[rid][-1].finish_reason

    def _wake(self) -> None:
        if self._parked_step > self._woken_step:
            self._woken_step = self._parked_step
            for link in self.links:
                link.inbox.put(Wake(step=self._woken_step))


def cpu_share(seconds: float) -> float:
    """Share of one core that this process uses over so many seconds."""
    start_cpu, start = time.process_time(), time.monotonic()
    threading.Event().wait(seconds)
    return (time.process_time() - start_cpu) / (time.monotonic() - start)
