"""The frontend's side of the engine: sends requests to replicas, takes outputs to who waits for them, wakes parked ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import structlog

from crossdock.errors import OverloadedError, RankLost, RuntimeFault
from crossdock.serving.control_calls import ControlCalls, RankSender
from crossdock.serving.engine_faults import EngineFaults
from crossdock.serving.park_state import ParkState
from crossdock.serving.replicas import Replica, ReplicaState
from crossdock.serving.router import Router, route
from crossdock.types.link import (
    AbortRequests,
    AddRequests,
    Control,
    ControlReply,
    Fatal,
    Incoming,
    Outgoing,
    Outputs,
    Parked,
    Ready,
    Stop,
)
from crossdock.types.request import EngineOutput, EngineRequest

_LOG = structlog.get_logger("crossdock.server")
Sink: TypeAlias = Callable[[EngineOutput], None]


@attrs.define(kw_only=True, eq=False)
class EngineClient:
    """Everything runs on the event loop; no lock is needed."""

    sender: RankSender
    num_ranks: int
    replicas: tuple[Replica, ...]
    router: Router
    max_in_flight_per_replica: int
    """Running and queued requests that a replica takes; beyond it requests are refused (429)."""
    ready: dict[int, Ready] = attrs.Factory(dict)
    faults: EngineFaults = attrs.Factory(EngineFaults)
    on_outputs: Callable[[Replica, Outputs], None] | None = None
    """Told of each message with outputs, for metrics."""
    _sinks: dict[str, tuple[Replica, Sink]] = attrs.Factory(dict)
    _calls: ControlCalls = attrs.Factory(ControlCalls)
    _park: ParkState = attrs.Factory(ParkState)
    _all_ready: asyncio.Event = attrs.Factory(asyncio.Event)

    @property
    def num_in_flight(self) -> int:
        return len(self._sinks)

    async def wait_ready(self) -> None:
        """Until every rank has sent ``Ready``.

        Raises:
            RuntimeFault: the engine failed before.
        """
        await self._all_ready.wait()
        self.check_alive()

    @property
    def failure(self) -> str | None:
        """Why nothing is taken any more; None while the engine works."""
        return self.faults.failure

    def check_alive(self) -> None:
        """Raises ``RuntimeFault`` with the reason when the engine has failed."""
        if self.failure is not None:
            raise RuntimeFault(self.failure)

    async def submit(self, requests: Sequence[EngineRequest], sink: Sink, *, pinned: int | None = None) -> None:
        """Sends the sequences of one client request; ``sink`` gets each output of each of them on the event loop.

        Raises:
            OverloadedError: queues are full (429) or no replica is in service (503); nothing was sent.
            RequestError: ``pinned`` names no replica.
        """
        if self.failure is not None:
            raise OverloadedError(f"the engine has failed: {self.failure}", retry_after_s=10, http_status=503)
        chosen: list[tuple[EngineRequest, Replica]] = []
        try:
            for request in requests:
                replica = route(request, self.replicas, self.router, pinned)
                if len(replica.in_flight) >= self.max_in_flight_per_replica and not request.is_health_check:
                    replica = self._least_full(pinned, replica)
                replica.sent(request)
                chosen.append((request, replica))
        except Exception:
            for request, replica in chosen:
                replica.finished(request.rid)
            raise
        by_replica: dict[int, list[EngineRequest]] = {}
        for request, replica in chosen:
            self._sinks[request.rid] = (replica, sink)
            by_replica.setdefault(replica.attn_dp_rank, []).append(request)
        for attn_dp_rank, batch in by_replica.items():
            await self._send(self.replicas[attn_dp_rank], AddRequests(requests=tuple(batch)))
        await self._wake_if_parked()

    async def abort(self, rids: Sequence[str]) -> int:
        """Ends sequences wherever they are; outputs that still come are dropped. Returns how many were running."""
        by_replica: dict[int, list[str]] = {}
        for rid in rids:
            entry = self._sinks.pop(rid, None)
            if entry is not None:
                by_replica.setdefault(entry[0].attn_dp_rank, []).append(rid)
        for attn_dp_rank, ended in by_replica.items():
            replica = self.replicas[attn_dp_rank]
            for rid in ended:
                replica.finished(rid)
            await self._send(replica, AbortRequests(rids=tuple(ended)))
        return sum(map(len, by_replica.values()))

    async def abort_matching(self, request_id: str | None) -> int:
        """Ends the sequences of one client request, telling their sinks; None: all of them."""
        rids = [
            rid
            for rid in self._sinks
            if request_id is None or rid == request_id or rid.rpartition("-")[0] == request_id
        ]
        sinks = [(rid, self._sinks[rid][1]) for rid in rids]
        await self.abort(rids)
        for rid, sink in sinks:
            sink(EngineOutput(rid=rid, token_ids=(), finish_reason="abort"))
        return len(rids)

    async def call(self, verb: str, arguments: Mapping[str, Any], timeout_s: float) -> list[ControlReply]:
        """Sends a verb to all replica leaders; their replies in replica order.

        Raises:
            RuntimeFault: a leader did not answer in time, or the engine failed.
            RequestError: a leader refused the verb.
        """
        self.check_alive()
        leaders = [replica.leader for replica in self.replicas if replica.state is not ReplicaState.FAILED]
        call_id = self._calls.open(leaders)
        # The verb goes out before the wake: some verbs are executed by all ranks together, in a step.
        await self.sender.send_all(leaders, Control(verb=verb, call_id=call_id, arguments=dict(arguments)))
        await self._wake_if_parked()
        return await self._calls.replies(call_id, verb, timeout_s)

    async def stop(self) -> None:
        """Asks every rank to leave its step loop."""
        await self.sender.send_all(range(self.num_ranks), Stop())

    def fail(self, message: str) -> None:
        """The engine is gone: everything that waits gets ``message`` now, nothing new is taken."""
        if not self.faults.fail(message):
            return
        for replica in self.replicas:
            replica.change(ReplicaState.FAILED)
        sinks, self._sinks = self._sinks, {}
        for rid, (replica, sink) in sinks.items():
            replica.finished(rid)
            sink(EngineOutput(rid=rid, token_ids=(), finish_reason="error", error=message))
        self._calls.fail(message)
        self._all_ready.set()

    async def receive(self, message: Outgoing) -> None:
        """Handles one message of a rank."""
        if isinstance(message, Outputs):
            await self._outputs(message)
        elif isinstance(message, Parked):
            await self._parked(message)
        elif isinstance(message, Ready):
            self.ready[message.rank] = message
            if len(self.ready) == self.num_ranks:
                for replica in self.replicas:
                    replica.progressed()
                self._all_ready.set()
        elif isinstance(message, ControlReply):
            self._calls.reply(message)
        else:
            self._fatal(message)

    def check_progress(self, stuck_after_s: float) -> None:
        """Marks replicas that have work and do not move."""
        for replica in self.replicas:
            replica.check_progress(stuck_after_s)

    async def _outputs(self, message: Outputs) -> None:
        replica = self._replica_of(message)
        if replica is not None:
            replica.reported(message.load)
            if self.on_outputs is not None:
                self.on_outputs(replica, message)
        for output in message.outputs:
            entry = self._sinks.get(output.rid)
            if entry is None:
                continue
            if replica is None:
                entry[0].reported(None)
            if output.finish_reason is not None:
                del self._sinks[output.rid]
                entry[0].finished(output.rid)
            entry[1](output)

    def _replica_of(self, message: Outputs) -> Replica | None:
        if message.load is not None and message.load.attn_dp_rank < len(self.replicas):
            return self.replicas[message.load.attn_dp_rank]
        for output in message.outputs:
            if output.rid in self._sinks:
                return self._sinks[output.rid][0]
        return None

    async def _parked(self, message: Parked) -> None:
        self._park.parked(message.step)
        for replica in self.replicas:
            if replica.leader == message.rank:
                replica.progressed()
        if self._sinks or self._calls.need_wake:
            await self._wake_if_parked()

    async def _wake_if_parked(self) -> None:
        wake = self._park.wake()
        if wake is not None:
            self._calls.woken()
            await self.sender.send_all(range(self.num_ranks), wake)

    def _fatal(self, message: Fatal) -> None:
        """A rank says why it ends; its exit follows and the supervisor decides."""
        self.faults.fatals.append(message)
        self.fail(self.faults.cause or message.message)

    def _least_full(self, pinned: int | None, replica: Replica) -> Replica:
        """Another replica with room when the chosen one is full. Raises ``OverloadedError`` when there is none."""
        others = [] if pinned is not None else [one for one in self.replicas if one.usable]
        least = min(others or [replica], key=lambda one: len(one.in_flight))
        if len(least.in_flight) >= self.max_in_flight_per_replica:
            raise OverloadedError(
                f"{len(least.in_flight)} requests are running or queued at the least busy replica, the limit is "
                f"{self.max_in_flight_per_replica}; try again later"
            )
        return least

    async def _send(self, replica: Replica, message: Incoming) -> None:
        try:
            await self.sender.send(replica.leader, message)
        except RankLost as error:
            # The supervisor reports the exit with its cause; until then nothing more goes there.
            _LOG.warning("replica unreachable", attn_dp_rank=replica.attn_dp_rank, reason=str(error))
            replica.change(ReplicaState.FAILED)
