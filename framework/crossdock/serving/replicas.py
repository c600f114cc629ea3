"""What the frontend knows of each attention replica: requests in flight, load, progress, whether it works."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

import attrs

from crossdock.types.request import EngineRequest, ReplicaLoad


class ReplicaState(enum.Enum):
    """``idle`` and ``running`` are healthy; ``stuck`` has work and makes no progress; ``failed`` is gone."""

    STARTING = "starting"
    IDLE = "idle"
    RUNNING = "running"
    STUCK = "stuck"
    FAILED = "failed"


@attrs.frozen(kw_only=True)
class Reservation:
    """What a request will cost a replica before the replica's own report counts it."""

    tokens: int
    attention_pairs: int


def reservation(request: EngineRequest) -> Reservation:
    """Prompt tokens, and query-key pairs of a causal prefill of them."""
    length = len(request.prompt_ids)
    return Reservation(tokens=length, attention_pairs=length * (length + 1) // 2)


def _now(replica: Replica) -> float:
    return replica.clock()


@attrs.define(kw_only=True)
class Replica:
    """One attention-DP replica, reached through its leader."""

    attn_dp_rank: int
    leader: int
    clock: Callable[[], float] = time.monotonic
    in_flight: dict[str, Reservation] = attrs.Factory(dict)
    """Requests sent and not finished, oldest first."""
    load: ReplicaLoad | None = None
    progress_s: float = attrs.field(default=attrs.Factory(_now, takes_self=True))
    """When the replica last showed that its step loop moves, by ``clock``."""
    state: ReplicaState = ReplicaState.STARTING
    since: float = attrs.Factory(time.time)
    """Unix seconds of the last change of ``state``."""

    @property
    def usable(self) -> bool:
        """New requests may go there."""
        return self.state in (ReplicaState.IDLE, ReplicaState.RUNNING)

    @property
    def reserved(self) -> tuple[Reservation, ...]:
        """Requests that the last load report cannot have counted.

        The link keeps order, so they are the youngest ones: as many as are in flight beyond those that the report counts.
        """
        counted = 0 if self.load is None else self.load.running + self.load.waiting
        missing = max(0, len(self.in_flight) - counted)
        return tuple(self.in_flight.values())[len(self.in_flight) - missing :]

    @property
    def tokens(self) -> int:
        """Tokens in its cache or to be prefilled, reservations included."""
        return (0 if self.load is None else self.load.tokens) + sum(one.tokens for one in self.reserved)

    @property
    def attention_pairs(self) -> int:
        return (0 if self.load is None else self.load.attention_pairs) + sum(
            one.attention_pairs for one in self.reserved
        )

    def sent(self, request: EngineRequest) -> None:
        """A request went out to it."""
        if not self.in_flight:
            self.progress_s = self.clock()
        self.in_flight[request.rid] = reservation(request)
        if self.usable:
            self.change(ReplicaState.RUNNING)

    def finished(self, rid: str) -> None:
        """A request ended there."""
        self.in_flight.pop(rid, None)
        if not self.in_flight and self.state is ReplicaState.RUNNING:
            self.change(ReplicaState.IDLE)

    def reported(self, load: ReplicaLoad | None) -> None:
        """Something came from it; a report with a new step is progress, an output is too."""
        if load is None or self.load is None or load.step != self.load.step:
            self.progressed()
        if load is not None:
            self.load = load

    def progressed(self) -> None:
        """Its step loop moves."""
        self.progress_s = self.clock()
        if self.state in (ReplicaState.STARTING, ReplicaState.STUCK):
            self.change(ReplicaState.RUNNING if self.in_flight else ReplicaState.IDLE)

    def check_progress(self, stuck_after_s: float) -> None:
        """Marks it stuck when it has work and has not moved for ``stuck_after_s``."""
        if self.state is ReplicaState.RUNNING and self.in_flight and self.clock() - self.progress_s > stuck_after_s:
            self.change(ReplicaState.STUCK)

    def change(self, state: ReplicaState) -> None:
        if state is not self.state:
            self.state = state
            self.since = time.time()
