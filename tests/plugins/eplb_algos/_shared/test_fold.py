"""Counts for two slots a GPU."""

from __future__ import annotations

import itertools

import numpy as np
from crossdock_eplb_algos._shared.counts import greedy_counts
from crossdock_eplb_algos._shared.fold import folded_peak, search_folded_counts


def _best_pairing(values: list[tuple[int, float]]) -> float:
    """Least fullest pair over all pairings without an expert twice, by trying them all."""
    if not values:
        return 0.0
    (expert, value), rest = values[0], values[1:]
    found = [
        max(value + other, _best_pairing(rest[:index] + rest[index + 1 :]))
        for index, (partner, other) in enumerate(rest)
        if partner != expert
    ]
    return min(found, default=float("inf"))


def test_the_fold_is_the_best_of_all_pairings() -> None:
    rng = np.random.default_rng(5)
    for _ in range(60):
        load = rng.integers(1, 60, 5).astype(np.float64)
        counts = greedy_counts(load[None], 8, 4)
        values = [(e, load[e] / counts[0, e]) for e in range(5) for _ in range(counts[0, e])]
        assert folded_peak(load[None], counts)[0] >= _best_pairing(values) - 1e-9
        if len({value for _, value in values}) == len(values):
            assert folded_peak(load[None], counts)[0] == _best_pairing(values)


def test_the_search_never_makes_the_fullest_pair_fuller_and_comes_near_the_best_counts() -> None:
    rng = np.random.default_rng(6)
    better = 0
    for _ in range(20):
        load = np.sort(rng.pareto(1.0, 6))[None] + 0.01
        start = greedy_counts(load, 10, 5)
        found = search_folded_counts(load, start, 5, load.sum(axis=1) / 5, 10, 6)
        assert found.sum() == 10 and found.min() >= 1 and found.max() <= 5
        peak, before = folded_peak(load, found)[0], folded_peak(load, start)[0]
        all_counts = [c for c in itertools.product(range(1, 6), repeat=6) if sum(c) == 10]
        best = min(folded_peak(load, np.array([c]))[0] for c in all_counts)
        assert best - 1e-9 <= peak <= before + 1e-9
        better += peak <= best * 1.1
    assert better >= 14
