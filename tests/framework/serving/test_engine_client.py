"""Waking parked ranks, aborts, failures, verbs: the frontend's side of the engine, message by message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import attrs
import pytest
from crossdock.errors import OverloadedError, RankLost, RequestError, RuntimeFault
from crossdock.serving.engine_client import EngineClient
from crossdock.serving.replicas import Replica, ReplicaState
from crossdock.serving.router import make_router
from crossdock.types.link import (
    AbortRequests,
    AddRequests,
    Control,
    ControlReply,
    Fatal,
    Incoming,
    Outputs,
    Parked,
    Ready,
    Wake,
)
from crossdock.types.request import EngineOutput, EngineRequest, SamplingParams


@attrs.define
class Mailbox:
    """Keeps what was sent, in order; ``gone`` ranks cannot be reached."""

    sent: list[tuple[int, Incoming]] = attrs.Factory(list)
    gone: set[int] = attrs.Factory(set)

    async def send(self, rank: int, message: Incoming) -> None:
        if rank in self.gone:
            raise RankLost(f"rank {rank} is gone", rank=rank)
        self.sent.append((rank, message))

    async def send_all(self, ranks: Sequence[int], message: Incoming) -> None:
        for rank in ranks:
            await self.send(rank, message)

    def of(self, kind: type) -> list[tuple[int, Incoming]]:
        return [(rank, message) for rank, message in self.sent if isinstance(message, kind)]


def request(rid: str) -> EngineRequest:
    return EngineRequest(rid=rid, prompt_ids=(1, 2), sampling=SamplingParams(max_new_tokens=4))


def run(scenario: Callable[[EngineClient, Mailbox], Awaitable[None]], *, ranks: int = 4, replicas: int = 2) -> None:
    """Runs a scenario; replica ``d`` is led by rank ``d * ranks / replicas``, the other ranks are attention-TP peers."""

    async def limited() -> None:
        mailbox = Mailbox()
        engine = EngineClient(
            sender=mailbox,
            num_ranks=ranks,
            replicas=tuple(Replica(attn_dp_rank=rank, leader=rank * ranks // replicas) for rank in range(replicas)),
            router=make_router("round_robin"),
            max_in_flight_per_replica=8,
        )
        for rank in range(ranks):
            await engine.receive(Ready(rank=rank, receipt={}))
        async with asyncio.timeout(10):
            await scenario(engine, mailbox)

    asyncio.run(limited())


def test_work_for_one_replica_wakes_every_rank_after_the_work_was_sent() -> None:
    async def scenario(engine: EngineClient, mailbox: Mailbox) -> None:
        for leader in (0, 2):
            await engine.receive(Parked(rank=leader, step=7))
        assert not mailbox.sent
        await engine.submit([request("a-0")], lambda _: None)
        assert [type(message) for _, message in mailbox.sent] == [AddRequests, Wake, Wake, Wake, Wake]
        assert mailbox.of(Wake) == [(rank, Wake(step=7)) for rank in range(4)]

    run(scenario)


def test_a_park_is_ended_by_one_wake_however_reports_and_work_interleave() -> None:
    async def scenario(engine: EngineClient, mailbox: Mailbox) -> None:
        await engine.submit([request("a-0")], lambda _: None)
        assert not mailbox.of(Wake)  # nobody is known to be parked
        await engine.receive(Parked(rank=0, step=3))  # it parked before the work reached it
        assert len(mailbox.of(Wake)) == 4
        await engine.receive(Parked(rank=2, step=3))  # the same park, reported by a slower rank
        await engine.submit([request("b-0")], lambda _: None)
        assert len(mailbox.of(Wake)) == 4
        await engine.receive(Parked(rank=2, step=9))  # still work in flight: this park must end too
        assert mailbox.of(Wake)[4:] == [(rank, Wake(step=9)) for rank in range(4)]

    run(scenario)


def test_a_verb_wakes_parked_ranks_once() -> None:
    async def scenario(engine: EngineClient, mailbox: Mailbox) -> None:
        await engine.receive(Parked(rank=0, step=1))
        call = asyncio.create_task(engine.call("flush_cache", {}, 5))
        while len(mailbox.of(Wake)) < 4:
            await asyncio.sleep(0)
        assert [rank for rank, _ in mailbox.of(Control)] == [0, 2]
        assert mailbox.sent.index(mailbox.of(Control)[-1]) < mailbox.sent.index(mailbox.of(Wake)[0])
        await engine.receive(Parked(rank=0, step=2))
        assert len(mailbox.of(Wake)) == 4
        for rank in (2, 0):
            await engine.receive(ControlReply(rank=rank, call_id=0, result={"rank": rank}))
        assert [reply.rank for reply in await call] == [0, 2]

    run(scenario)


def test_a_verb_that_reaches_ranks_about_to_park_wakes_them_when_they_say_so() -> None:
    async def scenario(engine: EngineClient, mailbox: Mailbox) -> None:
        call = asyncio.create_task(engine.call("flush_cache", {}, 5))
        while not mailbox.of(Control):
            await asyncio.sleep(0)
        assert not mailbox.of(Wake)
        await engine.receive(Parked(rank=0, step=5))
        assert len(mailbox.of(Wake)) == 4
        call.cancel()

    run(scenario)


def test_a_verb_without_an_answer_names_the_late_ranks_and_errors_are_raised() -> None:
    async def scenario(engine: EngineClient, mailbox: Mailbox) -> None:
        call = asyncio.create_task(engine.call("receipt", {}, 0.05))
        while not mailbox.of(Control):
            await asyncio.sleep(0)
        await engine.receive(ControlReply(rank=0, call_id=0, result={}))
        with pytest.raises(RuntimeFault, match=r"ranks \[2\] did not answer"):
            await call
        failing = asyncio.create_task(engine.call("nothing", {}, 5))
        while len(mailbox.of(Control)) < 4:
            await asyncio.sleep(0)
        for rank in (0, 2):
            await engine.receive(ControlReply(rank=rank, call_id=1, result={}, error="no such verb"))
        with pytest.raises(RequestError, match="no such verb"):
            await failing

    run(scenario)


def test_an_abort_goes_to_the_replica_of_each_sequence_and_late_outputs_are_dropped() -> None:
    async def scenario(engine: EngineClient, mailbox: Mailbox) -> None:
        outputs: list[EngineOutput] = []
        await engine.submit([request("a-0"), request("a-1"), request("a-2")], outputs.append)
        assert await engine.abort(["a-0", "a-1", "x"]) == 2
        assert mailbox.of(AbortRequests) == [(0, AbortRequests(rids=("a-0",))), (2, AbortRequests(rids=("a-1",)))]
        late = EngineOutput(rid="a-0", token_ids=(5,))
        await engine.receive(Outputs(outputs=(late, EngineOutput(rid="a-2", token_ids=(6,), finish_reason="length"))))
        assert [output.rid for output in outputs] == ["a-2"]
        assert engine.num_in_flight == 0
        assert all(not replica.in_flight for replica in engine.replicas)

    run(scenario)


def test_a_failure_reaches_everybody_who_waits_and_names_the_cause() -> None:
    async def scenario(engine: EngineClient, mailbox: Mailbox) -> None:
        outputs: list[EngineOutput] = []
        await engine.submit([request("a-0")], outputs.append)
        call = asyncio.create_task(engine.call("receipt", {}, 5))
        await asyncio.sleep(0)
        await engine.receive(Fatal(rank=1, message="connection closed by peer"))
        await engine.receive(Fatal(rank=2, message="rank 3 did not arrive at step 8", culprit_rank=3))
        await engine.receive(Fatal(rank=3, message="was killed by SIGKILL on machine 1", culprit_rank=3))
        assert engine.faults.cause == "rank 3: was killed by SIGKILL on machine 1"
        assert [(output.finish_reason, output.error) for output in outputs] == [
            ("error", "rank 1: connection closed by peer")
        ]
        with pytest.raises(RuntimeFault, match="closed by peer"):
            await call
        with pytest.raises(OverloadedError) as refused:
            await engine.submit([request("b-0")], outputs.append)
        assert refused.value.http_status == 503
        await asyncio.wait_for(engine.faults.wait(), 1)
        assert {replica.state for replica in engine.replicas} == {ReplicaState.FAILED}

    run(scenario)


def test_a_batch_that_does_not_fit_is_refused_whole() -> None:
    async def scenario(engine: EngineClient, mailbox: Mailbox) -> None:
        await engine.submit([request(f"a-{index}") for index in range(10)], lambda _: None)
        with pytest.raises(OverloadedError, match="limit is 8"):
            await engine.submit([request(f"b-{index}") for index in range(7)], lambda _: None)
        assert [len(replica.in_flight) for replica in engine.replicas] == [5, 5]
        await engine.submit([request(f"c-{index}") for index in range(6)], lambda _: None)
        assert [len(replica.in_flight) for replica in engine.replicas] == [8, 8]

    run(scenario)
