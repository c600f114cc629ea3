"""``bench latency`` and ``bench throughput``: the engine of every rank without HTTP, fed the same requests again and again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from crossdock.bench.clock import percentiles
from crossdock.bench.jobs import BenchJob
from crossdock.comm import RankComms
from crossdock.errors import UsageError
from crossdock.groups import leader_ranks
from crossdock.offline_job import spread
from crossdock.rank_plan import RankPlan, plan_rank
from crossdock.types.link import AddRequests, Incoming, Outgoing, Outputs, Parked, Stop, Wake
from crossdock.types.request import EngineRequest, SamplingParams

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@attrs.define(eq=False)
class RoundsLink:
    """``RankLink`` that hands over the same requests ``rounds`` times, each time after the last of them has ended."""

    requests: Sequence[EngineRequest]
    rounds: int
    first_token_s: list[float] = attrs.field(factory=list[float], init=False)
    """Of every round: from its start to the first token of any of its requests."""
    elapsed_s: list[float] = attrs.field(factory=list[float], init=False)
    """Of every round: from its start to the last token."""
    num_tokens: int = attrs.field(default=0, init=False)
    """Generated in the last round."""
    _open: set[str] = attrs.field(factory=set[str], init=False)
    _parked: int | None = attrs.field(default=None, init=False)
    _begun_s: float = attrs.field(default=0.0, init=False)

    def poll(self, timeout_s: float | None) -> Sequence[Incoming]:
        """The next round when the last one has ended, and a stop after all of them; never waits."""
        if self._open:
            return ()
        wake = () if self._parked is None else (Wake(step=self._parked),)
        self._parked = None
        if not self.requests or len(self.elapsed_s) == self.rounds:
            return (*wake, Stop())
        name = len(self.elapsed_s)
        requests = tuple(attrs.evolve(request, rid=f"{name}-{request.rid}") for request in self.requests)
        self._open = {request.rid for request in requests}
        self.num_tokens, self._begun_s = 0, time.perf_counter()
        return (*wake, AddRequests(requests=requests))

    def send(self, message: Outgoing) -> None:
        """Notes when tokens came.

        Raises:
            UsageError: a request was refused.
        """
        if isinstance(message, Parked):
            self._parked = message.step
        if not isinstance(message, Outputs):
            return
        after_s = time.perf_counter() - self._begun_s
        for output in message.outputs:
            if output.error is not None:
                raise UsageError(f"request {output.rid}: {output.error}")
            if len(self.first_token_s) == len(self.elapsed_s):
                self.first_token_s.append(after_s)
            self.num_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self._open.discard(output.rid)
        if not self._open and len(self.first_token_s) > len(self.elapsed_s):
            self.elapsed_s.append(after_s)


def bench_engine_on_rank(job: BenchJob, rank: int, comms: RankComms, store: Store | None) -> dict[str, Any]:
    """Times of this rank's replica; nothing on ranks that get no requests. Collective."""
    from crossdock.engine_build import build_engine

    plan = plan_rank(job.config, rank)
    sizes = plan.sizes
    is_leader = rank in leader_ranks(sizes)
    prompts = job.prompts or random_prompts(job, plan)
    owners = spread(prompts, sizes.attn_dp_size)
    sampling = SamplingParams(max_new_tokens=job.output_len, temperature=0.0, ignore_eos=True)
    requests = [
        EngineRequest(rid=str(index), prompt_ids=prompt, sampling=sampling)
        for index, (prompt, owner) in enumerate(zip(prompts, owners, strict=True))
        if is_leader and owner == plan.place.attn_dp_rank
    ]
    link = RoundsLink(requests, job.num_iters_warmup + job.num_iters)
    with build_engine(plan, comms, link, store=store) as engine:
        engine.run()
    first = job.num_iters_warmup
    return {
        "elapsed_s": link.elapsed_s[first:],
        "first_token_s": link.first_token_s[first:],
        "output_tokens": link.num_tokens,
    }


def random_prompts(job: BenchJob, plan: RankPlan) -> tuple[tuple[int, ...], ...]:
    """Seeded prompts of the model's vocabulary.

    Raises:
        UsageError: prompt and output do not fit the context.
    """
    if job.input_len + job.output_len > plan.max_sequence_tokens:
        raise UsageError(
            f"--input-len {job.input_len} and --output-len {job.output_len} need {job.input_len + job.output_len} tokens, "
            f"but the context holds {plan.max_sequence_tokens}"
        )
    drawn = np.random.default_rng(job.seed).integers(0, plan.info.vocab_size, (job.num_prompts, job.input_len))
    return tuple(tuple(int(token) for token in prompt) for prompt in drawn)


def _slowest(found: Sequence[dict[str, Any]], field: str) -> list[float]:
    """Of every round the slowest replica's time."""
    return [max(times) for times in zip(*(one[field] for one in found if one[field]), strict=True)]


def latency_report(job: BenchJob, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Fields as ``vllm bench latency`` writes them, in seconds, and the time to the first token beside them."""
    elapsed, first = _slowest(found, "elapsed_s"), _slowest(found, "first_token_s")
    return {
        "avg_latency": float(np.mean(elapsed)),
        "latencies": elapsed,
        "percentiles": percentiles(elapsed),
        "avg_first_token_latency": float(np.mean(first)),
        "batch_size": job.num_prompts,
        "input_len": job.input_len,
        "output_len": job.output_len,
        "num_iters": job.num_iters,
        "ranks": len(found),
    }


def throughput_report(job: BenchJob, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Fields as ``vllm bench throughput`` writes them; the median round counts."""
    elapsed = float(np.median(_slowest(found, "elapsed_s")))
    output_tokens = sum(int(one["output_tokens"]) for one in found)
    total = output_tokens + job.num_prompts * job.input_len
    return {
        "elapsed_time": elapsed,
        "num_requests": job.num_prompts,
        "total_num_tokens": total,
        "requests_per_second": job.num_prompts / elapsed,
        "tokens_per_second": total / elapsed,
        "output_tokens_per_second": output_tokens / elapsed,
        "input_len": job.input_len,
        "output_len": job.output_len,
        "num_iters": job.num_iters,
        "ranks": len(found),
    }
