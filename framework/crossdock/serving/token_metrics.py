"""What is measured of every token: plain numbers, because a client of Prometheus takes several microseconds for each observation."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

import attrs
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


def _no_counts(metrics: TokenMetrics) -> list[int]:
    return [0] * (len(metrics.bounds_s) + 1)


@attrs.define(kw_only=True, eq=False)
class TokenMetrics(Collector):
    """Generated tokens, and the time between two outputs of a sequence."""

    prefix: str
    model_name: str
    bounds_s: Sequence[float]
    """Upper ends of the buckets, ascending; the last bucket has none."""
    generated: int = attrs.field(default=0, init=False)
    _counts: list[int] = attrs.field(init=False, default=attrs.Factory(_no_counts, takes_self=True))
    _sum_s: float = attrs.field(default=0.0, init=False)

    def observe_interval(self, seconds: float) -> None:
        """Between two outputs, per token of the second one."""
        self._counts[bisect_left(self.bounds_s, seconds)] += 1
        self._sum_s += seconds

    def collect(self) -> Iterable[Metric]:
        """Both families, a sample each."""
        labels, values = ["model_name"], [self.model_name]
        tokens = CounterMetricFamily(self.prefix + "generation_tokens", "Generated tokens.", labels=labels)
        tokens.add_metric(values, self.generated)
        yield tokens
        text = "Between two outputs of a sequence, per token."
        intervals = HistogramMetricFamily(self.prefix + "inter_token_latency_seconds", text, labels=labels)
        ends = [*map(str, self.bounds_s), "+Inf"]
        intervals.add_metric(values, list(zip(ends, accumulate(self._counts), strict=True)), self._sum_s)
        yield intervals
