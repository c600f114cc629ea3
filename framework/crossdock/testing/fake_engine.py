"""An engine without a model: same messages, parking and lockstep as the real one, tokens by a rule. For tests of the frontend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import xxhash

from crossdock.types.link import (
    AbortRequests,
    AddRequests,
    Control,
    ControlReply,
    Incoming,
    Outgoing,
    Outputs,
    Parked,
    RankLink,
    Ready,
    Stop,
    Wake,
)
from crossdock.types.request import EngineOutput, EngineRequest, ReplicaLoad, TokenLogprob

TokenRule: TypeAlias = Callable[[EngineRequest, int], int]
"""The token at a position (from 0) of a request's output."""
VerbRule: TypeAlias = Callable[[Control], Mapping[str, Any]]
FAKE_VOCAB_SIZE = 512


def echo_token(request: EngineRequest, position: int) -> int:
    """The prompt again and again."""
    return request.prompt_ids[position % len(request.prompt_ids)]


def seeded_token(request: EngineRequest, position: int) -> int:
    """Depends on the seed and the position alone, like real sampling noise: two seeds agree at a position by chance only."""
    return xxhash.xxh64_intdigest(f"{request.sampling.seed} {position}".encode()) % FAKE_VOCAB_SIZE


def fixed_tokens(token_ids: Sequence[int]) -> TokenRule:
    """The same output for each request, repeated when it is too short."""
    return lambda _, position: token_ids[position % len(token_ids)]


def echo_verb(control: Control) -> Mapping[str, Any]:
    """A reply that shows what arrived."""
    return {"verb": control.verb, "arguments": control.arguments}


@attrs.define(kw_only=True, eq=False)
class FakeReplica:
    """Requests of one replica; each step gives each of them one token."""

    attn_dp_rank: int
    rule: TokenRule = echo_token
    eos_token_ids: frozenset[int] = frozenset()
    requests: dict[str, EngineRequest] = attrs.Factory(dict)
    produced: dict[str, list[int]] = attrs.Factory(dict)
    aborted: list[str] = attrs.Factory(list)
    """Ids of aborted requests, in order."""
    seen: list[EngineRequest] = attrs.Factory(list)
    """Every request that ever came."""

    def take(self, message: Incoming) -> None:
        """Adds or aborts requests."""
        if isinstance(message, AddRequests):
            for request in message.requests:
                self.requests[request.rid] = request
                self.produced[request.rid] = []
                self.seen.append(request)
        elif isinstance(message, AbortRequests):
            for rid in message.rids:
                if self.requests.pop(rid, None) is not None:
                    self.aborted.append(rid)

    def step(self) -> tuple[EngineOutput, ...]:
        """One token for each request; finished ones leave."""
        outputs = tuple(self._advance(request) for request in self.requests.values())
        for output in outputs:
            if output.finish_reason is not None:
                del self.requests[output.rid]
        return outputs

    def load(self, step: int) -> ReplicaLoad:
        """The report of this moment; health probes are not in it."""
        running = [request for request in self.requests.values() if not request.is_health_check]
        tokens = sum(len(request.prompt_ids) + len(self.produced[request.rid]) for request in running)
        return ReplicaLoad(
            attn_dp_rank=self.attn_dp_rank,
            running=len(running),
            waiting=0,
            tokens=tokens,
            attention_pairs=tokens,
            kv_usage=min(1.0, tokens / 4096),
            step=step,
        )

    def _advance(self, request: EngineRequest) -> EngineOutput:
        sampling = request.sampling
        produced = self.produced[request.rid]
        is_first = not produced
        prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        if is_first and sampling.prompt_logprobs is not None:
            scored = [_logprob(token, sampling.prompt_logprobs) for token in request.prompt_ids[1:]]
            prompt_logprobs = (None, *scored)
        token_ids: tuple[int, ...] = ()
        if sampling.max_new_tokens > 0:
            token_ids = (self.rule(request, len(produced)),)
            produced.extend(token_ids)
        return EngineOutput(
            rid=request.rid,
            token_ids=token_ids,
            finish_reason=self._finish_reason(request, produced),
            prompt_tokens=len(request.prompt_ids) if is_first else 0,
            logprobs=tuple(_logprob(token, sampling.logprobs) for token in token_ids if sampling.logprobs is not None),
            prompt_logprobs=prompt_logprobs,
        )

    def _finish_reason(self, request: EngineRequest, produced: Sequence[int]) -> str | None:
        sampling = request.sampling
        if produced and len(produced) >= sampling.min_new_tokens:
            is_eos = produced[-1] in self.eos_token_ids and not sampling.ignore_eos
            if is_eos or produced[-1] in sampling.stop_token_ids:
                return "stop"
        return "length" if len(produced) >= sampling.max_new_tokens else None


def _logprob(token: int, num_top: int | None) -> TokenLogprob:
    top = tuple(((token + place) % FAKE_VOCAB_SIZE, -0.5 - place) for place in range(num_top or 0))
    return TokenLogprob(token_id=token, logprob=-0.5, top=top)


@attrs.define(kw_only=True, eq=False)
class FakeEngine:
    """All replicas in one event loop, in lockstep; stands where the frontend's link stands."""

    replicas: tuple[FakeReplica, ...]
    verb: VerbRule = echo_verb
    receive: Callable[[Outgoing], Awaitable[None]] | None = None
    """The frontend's end; set before ``run``."""
    step: int = 0
    is_parked: bool = False
    wakes: list[int] = attrs.Factory(list)
    running: asyncio.Event = attrs.Factory(asyncio.Event)
    """Cleared: the step loop stands still, as in a stuck collective."""
    _mail: asyncio.Queue[tuple[int, Incoming]] = attrs.Factory(asyncio.Queue)

    async def send(self, rank: int, message: Incoming) -> None:
        self._mail.put_nowait((rank, message))

    async def send_all(self, ranks: Sequence[int], message: Incoming) -> None:
        for rank in ranks:
            await self.send(rank, message)

    async def run(self) -> None:
        """Steps until it is cancelled or stopped."""
        self.running.set()
        for replica in self.replicas:
            await self._emit(Ready(rank=replica.attn_dp_rank, receipt={"attn_dp_rank": replica.attn_dp_rank}))
        woken = -1
        while True:
            while self.is_parked or not self._mail.empty():
                rank, message = await self._mail.get()
                if isinstance(message, Stop):
                    return
                woken = await self._take(rank, message, woken)
                self.is_parked = self.is_parked and self.step > woken
            await self.running.wait()
            self.step += 1
            if not any(replica.requests for replica in self.replicas):
                self.is_parked = self.step > woken
                for replica in self.replicas:
                    await self._emit(Parked(rank=replica.attn_dp_rank, step=self.step))
            else:
                for replica in self.replicas:
                    await self._emit(Outputs(outputs=replica.step(), load=replica.load(self.step)))
            await asyncio.sleep(0)

    async def _take(self, rank: int, message: Incoming, woken: int) -> int:
        if isinstance(message, Wake):
            if rank == 0:
                self.wakes.append(message.step)
            return max(woken, message.step)
        if isinstance(message, Control):
            reply = ControlReply(rank=rank, call_id=message.call_id, result=dict(self.verb(message)))
            await self._emit(reply)
        else:
            self.replicas[rank].take(message)
        return woken

    async def _emit(self, message: Outgoing) -> None:
        if self.receive is not None:
            await self.receive(message)


def run_fake_rank(
    link: RankLink, attn_dp_rank: int, rank: int, *, rule: TokenRule = echo_token, step_s: float = 0.002
) -> None:
    """The step loop of one rank process without collectives: answers what it gets until ``Stop``; a step takes ``step_s``."""
    replica = FakeReplica(attn_dp_rank=attn_dp_rank, rule=rule)
    link.send(Ready(rank=rank, receipt={"attn_dp_rank": attn_dp_rank}))
    step = 0
    while True:
        for message in link.poll(None if not replica.requests else step_s):
            if isinstance(message, Stop):
                return
            if isinstance(message, Control):
                link.send(ControlReply(rank=rank, call_id=message.call_id, result=dict(echo_verb(message))))
            replica.take(message)
        if replica.requests:
            step += 1
            link.send(Outputs(outputs=replica.step(), load=replica.load(step)))
            if not replica.requests:
                link.send(Parked(rank=rank, step=step))
