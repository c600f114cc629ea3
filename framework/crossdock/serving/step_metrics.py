"""Metrics that ranks count themselves, step by step; read from each replica's last load report when ``/metrics`` is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

import attrs
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from crossdock.types.request import ReplicaLoad
from crossdock.types.step_totals import (
    IMBALANCE_RATIOS,
    ITERATION_TOKENS,
    SYNC_WAITS_S,
    HistogramCounts,
    StepTotals,
)

_LABELS = ("model_name", "engine")


@attrs.define(kw_only=True, eq=False)
class StepMetrics(Collector):
    """Names are vLLM's (``num_preemptions``, ``iteration_tokens_total``) and SGLang's (``dp_attention_*``) behind our prefix."""

    prefix: str
    model_name: str
    loads: Mapping[int, ReplicaLoad]
    """The last report of each replica, by attention-DP rank; a replica without one yet counts zero."""
    num_replicas: int

    def collect(self) -> Iterable[Metric]:
        """All families, a sample a replica each."""
        reports = [(str(rank), self.loads.get(rank)) for rank in range(self.num_replicas)]
        steps = {engine: StepTotals() if load is None else load.steps for engine, load in reports}
        preemptions = self._counter("num_preemptions", "Sequences that gave up their pages, to be computed again.")
        for engine, load in reports:
            preemptions.add_metric((self.model_name, engine), 0 if load is None else load.preemptions)
        yield preemptions
        yield from self._counters(steps)
        yield self._histogram(
            "iteration_tokens_total",
            "Rows of a replica in a step.",
            ITERATION_TOKENS,
            {engine: one.iteration_tokens for engine, one in steps.items()},
        )
        yield self._histogram(
            "dp_attention_token_imbalance_ratio",
            "Largest over mean rows of the replicas in a step.",
            IMBALANCE_RATIOS,
            {"0": steps["0"].token_imbalance_ratio},
        )
        yield self._histogram(
            "dp_attention_sync_wait_seconds",
            "A replica's wait for the others before a step.",
            SYNC_WAITS_S,
            {engine: one.sync_wait_s for engine, one in steps.items()},
        )

    def _counters(self, steps: Mapping[str, StepTotals]) -> Iterator[Metric]:
        for name, what in (("tokens", "Rows"), ("attention_pairs", "Query-key pairs")):
            family = self._counter(
                f"dp_attention_{name.removeprefix('attention_')}",
                f"{what}: own ones, and by how much the busiest replica had more.",
                "kind",
            )
            for engine, totals in steps.items():
                family.add_metric((self.model_name, engine, "scheduled"), getattr(totals, name))
                family.add_metric((self.model_name, engine, "imbalance"), getattr(totals, f"{name}_behind"))
            yield family
        family = self._counter("dp_attention_steps", "Steps with rows of the replica's own, and without.", "rank_state")
        for engine, totals in steps.items():
            family.add_metric((self.model_name, engine, "active"), totals.active_steps)
            family.add_metric((self.model_name, engine, "idle"), totals.idle_steps)
        yield family

    def _counter(self, name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(self.prefix + name, text, labels=(*_LABELS, *labels))

    def _histogram(
        self, name: str, text: str, bounds: tuple[float, ...], by_engine: Mapping[str, HistogramCounts]
    ) -> Metric:
        family = HistogramMetricFamily(self.prefix + name, text, labels=_LABELS)
        ends = [*map(str, bounds), "+Inf"]
        for engine, histogram in by_engine.items():
            buckets = list(zip(ends, accumulate(histogram.counts), strict=True))
            family.add_metric((self.model_name, engine), buckets, histogram.sum)
        return family
