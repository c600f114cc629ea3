"""Replica counts."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from crossdock.testing.expert_loads import LOADS
from crossdock_eplb_algos._shared.counts import greedy_counts, max_copies, threshold_counts


def _one_by_one(load: list[float], num_slots: int, most: int) -> list[int]:
    """The greedy rule as a loop with a heap."""
    counts = [1] * len(load)
    heap = [(-value, expert) for expert, value in enumerate(load)]
    heapq.heapify(heap)
    for _ in range(num_slots - len(load)):
        _, expert = heapq.heappop(heap)
        counts[expert] += 1
        if counts[expert] < most:
            heapq.heappush(heap, (-load[expert] / counts[expert], expert))
    return counts


@pytest.mark.parametrize("kind", sorted(LOADS))
@pytest.mark.parametrize(("num_slots", "num_gpus"), [(32, 8), (40, 8), (64, 4), (96, 32)])
def test_they_are_those_of_giving_out_one_replica_after_the_other(kind: str, num_slots: int, num_gpus: int) -> None:
    load = LOADS[kind]((1, 5, 32), 3)[0] + np.linspace(0, 0.5, 32)
    most = max_copies(32, num_slots, num_gpus)
    counts = greedy_counts(load, num_slots, most)
    assert counts.tolist() == [_one_by_one(row.tolist(), num_slots, most) for row in load]


def test_no_expert_has_more_replicas_than_there_are_gpus() -> None:
    load = np.array([[1000.0, 1.0, 1.0, 1.0]])
    assert greedy_counts(load, 8, max_copies(4, 8, 4)).tolist() == [[4, 2, 1, 1]]


def test_a_layer_of_zeros_gets_its_spare_slots_spread_evenly() -> None:
    assert greedy_counts(np.zeros((1, 4)), 10, 4).max() == 3


def test_threshold_counts_split_no_more_than_needed_and_fill_all_slots() -> None:
    load = np.array([[9.0, 4.0, 2.0, 1.0]])
    counts, penalty = threshold_counts(load, 8, 4, 1.0, spare_to_cold=True)
    assert counts.sum() == 8
    assert penalty.tolist() == [0.0]
    assert (load / counts).max() <= 4.0


def test_a_threshold_that_does_not_fit_falls_back_to_greedy_counts_and_says_so() -> None:
    load = np.array([[9.0, 4.0, 2.0, 1.0]])
    counts, penalty = threshold_counts(load, 5, 4, 0.1, spare_to_cold=False)
    assert counts.tolist() == greedy_counts(load, 5, 4).tolist()
    assert np.isinf(penalty).all()
