"""``/metrics``: names end as vLLM's do, so that dashboards port by replacing the prefix; no label grows with experts or ranks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import attrs
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from crossdock.serving.choices import ChoiceDelta
from crossdock.serving.generation import GenerationPlan
from crossdock.serving.replicas import Replica
from crossdock.serving.step_metrics import StepMetrics
from crossdock.serving.token_metrics import TokenMetrics
from crossdock.types.request import ReplicaLoad

PREFIX = "crossdock:"
_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_WAIT_S = (*_FAST_S, 30.0, 60.0)
_SLOW_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class ServerMetrics:
    """Counters of one frontend, in a registry of their own."""

    def __init__(self, model_name: str, num_replicas: int) -> None:
        self.registry = CollectorRegistry()
        self._clock: Callable[[], float] = time.monotonic
        engines = [str(rank) for rank in range(num_replicas)]

        def gauges(name: str, text: str) -> list[Gauge]:
            family = Gauge(PREFIX + name, text, ["model_name", "engine"], registry=self.registry)
            return [family.labels(model_name, engine) for engine in engines]

        def counter(name: str, text: str) -> Counter:
            return Counter(PREFIX + name, text, ["model_name"], registry=self.registry).labels(model_name)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            family = Histogram(PREFIX + name, text, ["model_name"], registry=self.registry, buckets=buckets)
            return family.labels(model_name)

        self.running = gauges("num_requests_running", "Sequences that a replica computes.")
        self.waiting = gauges("num_requests_waiting", "Sequences that wait at a replica.")
        self.kv_usage = gauges("kv_cache_usage_perc", "Used part of a replica's KV cache, 1 is full.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted sequences.")
        self.prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        success = Counter(
            PREFIX + "request_success", "Finished sequences.", ["model_name", "finished_reason"], registry=self.registry
        )
        self.success = {reason: success.labels(model_name, reason) for reason in ("stop", "length", "abort")}
        errors = Counter(
            PREFIX + "http_errors", "Error answers by status.", ["model_name", "code"], registry=self.registry
        )
        self._errors, self._model_name = errors, model_name
        self._engine_gauges: dict[str, Gauge] = {}
        self._loads: dict[int, ReplicaLoad] = {}
        self.registry.register(
            StepMetrics(prefix=PREFIX, model_name=model_name, loads=self._loads, num_replicas=num_replicas)
        )
        self.first_token = histogram("time_to_first_token_seconds", "From the request to its first token.", _WAIT_S)
        self.tokens = TokenMetrics(prefix=PREFIX, model_name=model_name, bounds_s=_FAST_S)
        self.registry.register(self.tokens)
        self.e2e = histogram("e2e_request_latency_seconds", "From the request to the end of a sequence.", _SLOW_S)
        self.queue_time = histogram("request_queue_time_seconds", "Waiting at the replica.", _WAIT_S)
        self.prefill_time = histogram("request_prefill_time_seconds", "Prefill of the prompt.", _WAIT_S)
        self.decode_time = histogram("request_decode_time_seconds", "From first to last token.", _SLOW_S)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def replica_reported(self, replica: Replica) -> None:
        """Copies a replica's last load report."""
        load = replica.load
        if load is not None:
            rank = replica.attn_dp_rank
            self._loads[rank] = load
            self.running[rank].set(load.running)
            self.waiting[rank].set(load.waiting)
            self.kv_usage[rank].set(load.kv_usage)
            for name, value in load.gauges.items():
                self._engine_gauge(name).labels(self._model_name, str(rank)).set(value)

    def _engine_gauge(self, name: str) -> Gauge:
        """A number that ranks report by name, for instance of balancing; the names are ours and few."""
        family = self._engine_gauges.get(name)
        if family is None:
            text = f"{name.replace('_', ' ').capitalize()}, as the replica's first rank reports it."
            family = Gauge(PREFIX + name, text, ["model_name", "engine"], registry=self.registry)
            self._engine_gauges[name] = family
        return family

    def http_error(self, status: int) -> None:
        """Counts an error answer; the statuses are few, so the label is bounded."""
        self._errors.labels(self._model_name, str(status)).inc()

    async def measured(
        self, deltas: AsyncGenerator[list[ChoiceDelta], None], plan: GenerationPlan
    ) -> AsyncGenerator[list[ChoiceDelta], None]:
        """Passes ``deltas`` on and measures them; health probes are passed on only. Sequences that a client gives up count as aborted."""
        marks: dict[int, _Marks] = {}
        try:
            if plan.is_health_check:
                async for batch in deltas:
                    yield batch
                return
            begin = self._clock()
            async for batch in deltas:
                now = self._clock()
                for delta in batch:
                    mark = marks.get(delta.index)
                    if mark is None:
                        mark = marks[delta.index] = _Marks()
                    self._measure(delta, mark, plan, begin, now)
                yield batch
        except (GeneratorExit, asyncio.CancelledError):
            if not plan.is_health_check:
                self.success["abort"].inc(sum(not mark.finished for mark in _all(marks, plan)))
            raise
        finally:
            await deltas.aclose()

    def _measure(self, delta: ChoiceDelta, mark: _Marks, plan: GenerationPlan, begin: float, now: float) -> None:
        count = len(delta.token_ids)
        if mark.last is None:
            prompt = len(plan.prompts[delta.index // plan.n].ids)
            self.prompt_tokens.inc(prompt)
            self.prefix_queries.inc(prompt)
            self.prefix_hits.inc(delta.cached_tokens)
            self.first_token.observe(now - begin)
            self.queue_time.observe(delta.queued_s)
            self.prefill_time.observe(delta.prefill_s)
            mark.first = now
        elif count:
            self.tokens.observe_interval((now - mark.last) / count)
        mark.last = now
        self.tokens.generated += count
        if delta.finish_reason is not None:
            mark.finished = True
            self.e2e.observe(now - begin)
            self.decode_time.observe(now - mark.first)
            counter = self.success.get(delta.finish_reason)
            if counter is not None:
                counter.inc()


@attrs.define
class _Marks:
    """Times of one choice, by the metrics' clock."""

    first: float = 0.0
    last: float | None = None
    finished: bool = False


def _all(marks: dict[int, _Marks], plan: GenerationPlan) -> list[_Marks]:
    """One a choice, those without any output too."""
    return [marks.get(index, _Marks()) for index in range(plan.num_choices)]
