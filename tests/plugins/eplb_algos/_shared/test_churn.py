"""Few moves from a placement in force."""

from __future__ import annotations

import numpy as np
import pytest
from crossdock.testing.expert_loads import LOADS
from crossdock_eplb_algos._shared.balance import EFFORTS, balanced_packing
from crossdock_eplb_algos._shared.churn import MoveLimits, fewest_moves
from crossdock_eplb_algos._shared.packing import Packing, has_twins, packing_of, replica_counts
from crossdock_eplb_algos._shared.slots import moved_replicas

Loads = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
NO_LIMITS = MoveLimits(max_moves=None, price=0.0)


def _two_states(kind: str, shape: tuple[int, int, int], num_slots: int, num_gpus: int) -> tuple[Packing, Loads]:
    """A plan for the first step, seen under the load of the last one."""
    steps = LOADS[kind](shape, 4)
    planned = balanced_packing(steps[0], num_slots, num_gpus, EFFORTS["default"])
    return packing_of(planned.experts.reshape(shape[1], -1), steps[-1], num_gpus), steps[-1]


def _walk(start: Packing, load: Loads, part_above: float, limits: MoveLimits) -> Packing:
    packing = start.rows(np.arange(len(load)))
    num_gpus = packing.experts.shape[1]
    counts = replica_counts(packing.experts.reshape(len(load), -1), load.shape[1])
    enough = load.sum(axis=1) / num_gpus * (1 + part_above)
    fewest_moves(packing, load, counts, enough, enough, limits)
    slots = packing.experts.reshape(len(load), -1)
    assert np.array_equal(counts, replica_counts(slots, load.shape[1]))
    np.testing.assert_allclose(packing.loads, packing_of(slots, load, num_gpus).loads)
    assert not has_twins(packing.experts).any()
    assert counts.min() >= 1
    return packing


@pytest.mark.parametrize("kind", ["drift", "bursty", "topics"])
def test_the_state_stays_consistent_and_is_never_worse(kind: str) -> None:
    start, load = _two_states(kind, (6, 5, 32), 40, 8)
    assert (_walk(start, load, 0.02, NO_LIMITS).max_load() <= start.max_load()).all()


@pytest.mark.parametrize("most", [0, 1, 2, 5, 9])
def test_a_hard_limit_is_kept_in_every_layer(most: int) -> None:
    start, load = _two_states("drift", (6, 5, 32), 40, 8)
    found = _walk(start, load, 0.0, MoveLimits(max_moves=np.full(5, most), price=0.0))
    moved = moved_replicas(start.experts, found.experts, 32)
    assert moved.max() <= most


def test_more_moves_give_more_balance() -> None:
    start, load = _two_states("drift", (6, 5, 32), 40, 8)
    peaks = [
        _walk(start, load, 0.0, MoveLimits(max_moves=np.full(5, most), price=0.0)).max_load().mean()
        for most in (0, 4, 12)
    ]
    assert peaks[0] > peaks[1] > peaks[2]


def test_a_price_takes_fewer_moves_and_a_high_one_none() -> None:
    start, load = _two_states("drift", (6, 5, 32), 40, 8)
    moved = [
        moved_replicas(
            start.experts, _walk(start, load, 0.0, MoveLimits(max_moves=None, price=price)).experts, 32
        ).sum()
        for price in (0.0, 0.01, 10.0)
    ]
    assert moved[0] > moved[1] > moved[2] == 0


def test_a_layer_without_load_is_left_alone() -> None:
    start, load = _two_states("drift", (6, 5, 32), 40, 8)
    load = load.copy()
    load[2] = 0.0
    start = packing_of(start.experts.reshape(5, -1), load, 8)
    found = _walk(start, load, 0.02, NO_LIMITS)
    assert np.array_equal(found.experts[2], start.experts[2])
