"""Counts of one rank in a registry of its own, written to a file now and then. Names follow SGLang's dashboards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, write_to_textfile

from crossdock.types.observer import StepEvent


class PrometheusObserver:
    """Few series whatever the model's size: modes, not layers or ranks, are labels."""

    def __init__(self, folder: str, rank: int, every_steps: int) -> None:
        self._path = Path(folder) / f"crossdock_rank{rank}.prom"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._every_steps = every_steps
        self._steps_seen = 0
        self._registry = CollectorRegistry()
        self._steps = self._counter("steps", "Finished steps.", "forward_mode", "padding_mode", "dispatch_mode")
        self._tokens = self._counter("dp_attention_tokens", "Rows of all replicas.")
        self._pairs = self._counter("dp_attention_pairs", "Query-key pairs of all replicas.")
        self._wait = self._counter("dp_attention_sync_wait_seconds", "Time spent waiting for other replicas.")
        self._imbalance = self._gauge("dp_attention_token_imbalance_ratio", "Largest over mean rows of the last step.")
        self._balancedness = self._gauge(
            "eplb_balancedness", "Mean over layers of mean/max expert load.", "forward_mode"
        )
        self._rebalances = self._counter("eplb_rebalances", "Rebalances by outcome.", "outcome")
        self._faults = self._counter("faults", "Ranks that failed.")

    def on_step(self, event: StepEvent) -> None:
        """Counts a step; probes are left out."""
        if event.is_health_check:
            return
        self._steps.labels(event.forward_mode, event.padding_mode, event.dispatch_mode).inc()
        self._tokens.inc(sum(event.all_tokens))
        self._pairs.inc(sum(event.attention_pairs))
        self._wait.inc(event.sync_wait_s)
        if sum(event.all_tokens):
            self._imbalance.set(max(event.all_tokens) * len(event.all_tokens) / sum(event.all_tokens))
        self._steps_seen += 1
        if self._steps_seen % self._every_steps == 0:
            self._write()

    def on_load(self, forward_mode: str, balancedness_per_layer: tuple[float, ...]) -> None:
        """Keeps the mean of the layers."""
        if balancedness_per_layer:
            mean = sum(balancedness_per_layer) / len(balancedness_per_layer)
            self._balancedness.labels(forward_mode).set(mean)

    def on_rebalance(self, event: Mapping[str, Any]) -> None:
        """Counts a rebalance and writes the file: rare and worth seeing at once."""
        self._rebalances.labels(str(event.get("outcome", "unknown"))).inc()
        self._write()

    def on_fault(self, rank: int, message: str) -> None:
        """Counts a fault and writes the file, the process may not live to do it later."""
        self._faults.inc()
        self._write()

    def _write(self) -> None:
        write_to_textfile(str(self._path), self._registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(name, help, labels, namespace="crossdock", registry=self._registry)

    def _gauge(self, name: str, help: str, *labels: str) -> Gauge:
        return Gauge(name, help, labels, namespace="crossdock", registry=self._registry)
