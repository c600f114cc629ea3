"""What the steps of a replica add up to since its start: the numbers behind the histograms and counters of ``/metrics``."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import attrs

ITERATION_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
"""Bounds of ``iteration_tokens``, rows a step: vLLM's."""
IMBALANCE_RATIOS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0)
"""Bounds of ``token_imbalance_ratio``: SGLang's (the facts, section 9)."""
SYNC_WAITS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Bounds of ``sync_wait_s``: 0.1 ms to 1 s (the facts, section 9)."""


@attrs.frozen(kw_only=True)
class HistogramCounts:
    """Observations by bucket, not cumulative: one for each bound (bound included) and a last one for what is larger."""

    counts: tuple[int, ...]
    sum: float = 0.0


def empty_histogram(bounds: tuple[float, ...]) -> HistogramCounts:
    """Nothing observed; ``bounds`` must ascend."""
    assert all(low < high for low, high in pairwise(bounds)), "bounds of a histogram ascend"
    return HistogramCounts(counts=(0,) * (len(bounds) + 1))


def observed(histogram: HistogramCounts, bounds: tuple[float, ...], value: float) -> HistogramCounts:
    """``histogram`` with one more observation."""
    place = bisect_left(bounds, value)
    counts = histogram.counts
    return HistogramCounts(counts=(*counts[:place], counts[place] + 1, *counts[place + 1 :]), sum=histogram.sum + value)


@attrs.frozen(kw_only=True)
class StepTotals:
    """Sums over steps that computed something on any replica; steps with health probes only are left out."""

    active_steps: int = 0
    """Steps in which this replica had rows."""
    idle_steps: int = 0
    """Steps that it ran for the others, without rows of its own."""
    tokens: int = 0
    tokens_behind: int = 0
    """Over all steps, the busiest replica's rows less its own."""
    attention_pairs: int = 0
    attention_pairs_behind: int = 0
    iteration_tokens: HistogramCounts = attrs.Factory(lambda: empty_histogram(ITERATION_TOKENS))
    """Own rows of active steps."""
    token_imbalance_ratio: HistogramCounts = attrs.Factory(lambda: empty_histogram(IMBALANCE_RATIOS))
    """Largest over mean rows of the replicas; the first replica's leader counts it for all."""
    sync_wait_s: HistogramCounts = attrs.Factory(lambda: empty_histogram(SYNC_WAITS_S))
    """Waiting for the other replicas' records, with what was carried over from steps without a batch."""
