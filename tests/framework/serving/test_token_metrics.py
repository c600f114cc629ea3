"""Metrics of tokens against a histogram of Prometheus's own client."""

from __future__ import annotations

from crossdock.serving.token_metrics import TokenMetrics
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

BOUNDS_S = (0.001, 0.01, 2.5, 10.0)


def samples(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if line.startswith("x:inter_token") and "_created" not in line]


def test_intervals_are_counted_as_the_client_library_counts_them() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    metrics = TokenMetrics(prefix="x:", model_name="tiny", bounds_s=BOUNDS_S)
    ours.register(metrics)
    name = "x:inter_token_latency_seconds"
    histogram = Histogram(name, "Between two.", ["model_name"], registry=theirs, buckets=BOUNDS_S).labels("tiny")
    for seconds in (0.0, 0.0005, 0.001, 0.0011, 0.01, 2.0, 2.5, 9.0, 10.0, 11.0, 400.0):
        metrics.observe_interval(seconds)
        histogram.observe(seconds)
    assert samples(ours) == samples(theirs)


def test_tokens_are_a_counter_of_the_model() -> None:
    registry = CollectorRegistry()
    metrics = TokenMetrics(prefix="x:", model_name="tiny", bounds_s=BOUNDS_S)
    registry.register(metrics)
    assert 'x:generation_tokens_total{model_name="tiny"} 0.0' in generate_latest(registry).decode()
    metrics.generated += 7
    assert 'x:generation_tokens_total{model_name="tiny"} 7.0' in generate_latest(registry).decode()
