"""Swaps of pairs: only better, no twins, nothing lost."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from crossdock_eplb_algos._shared.packing import Packing, has_twins, packing_of
from crossdock_eplb_algos._shared.pair_swaps import FEWEST_SLOTS, MOST_SLOTS, pair_swap_rounds
from crossdock_eplb_algos._shared.refine import exchange_rounds


def drawn(num_layers: int, num_gpus: int, num_slots: int, seed: int) -> Packing:
    """Some copies, dealt so that none has its twin beside it; loads of all sizes."""
    rng = np.random.default_rng(seed)
    num_experts = num_gpus * num_slots - 2 * num_gpus
    load = rng.lognormal(0, 1, (num_layers, num_experts))
    experts = np.concatenate((np.arange(num_experts), np.arange(2 * num_gpus)))
    slots = np.sort(experts).reshape(num_slots, num_gpus).T.ravel()
    return packing_of(np.tile(slots, (num_layers, 1)), load, num_gpus)


@pytest.mark.parametrize("num_gpus", [3, 8, 32])
@pytest.mark.parametrize("num_slots", [FEWEST_SLOTS, 7, MOST_SLOTS])
def test_each_round_empties_full_gpus_and_loses_no_replica(num_gpus: int, num_slots: int) -> None:
    packing = drawn(5, num_gpus, num_slots, seed=num_gpus)
    before = np.sort(packing.experts.reshape(5, -1), axis=1)
    load_of = dict(zip(packing.experts[0].ravel().tolist(), packing.loads[0].ravel().tolist(), strict=True))
    peaks = [packing.max_load()]
    for _ in range(6):
        pair_swap_rounds(packing, np.zeros(5), rounds=1)
        peaks.append(packing.max_load())
    assert all((after <= peak).all() for peak, after in itertools.pairwise(peaks))
    assert (peaks[-1] < peaks[0]).all()
    assert np.array_equal(np.sort(packing.experts.reshape(5, -1), axis=1), before)
    assert not has_twins(packing.experts).any()
    assert [load_of[expert] for expert in packing.experts[0].ravel().tolist()] == packing.loads[0].ravel().tolist()


def test_pairs_help_where_no_single_swap_does() -> None:
    loads = np.array([[[7.0, 7, 10, 0, 0, 0], [8, 5, 4.5, 4.5, 0, 0]]])
    packing = Packing(experts=np.arange(12).reshape(1, 2, 6), loads=loads)
    exchange_rounds(packing, np.array([23.0]), (1, 1))
    assert packing.gpu_loads().tolist() == [[24.0, 22.0]]
    pair_swap_rounds(packing, np.array([23.0]), rounds=1)
    assert packing.gpu_loads().tolist() == [[23.0, 23.0]]


def test_layers_at_their_target_and_other_numbers_of_slots_are_left_alone() -> None:
    for num_slots, target in ((FEWEST_SLOTS, np.inf), (FEWEST_SLOTS - 1, 0.0), (MOST_SLOTS + 1, 0.0)):
        packing = drawn(2, 4, num_slots, seed=1)
        before = packing.experts.copy()
        pair_swap_rounds(packing, np.full(2, target), rounds=4)
        assert np.array_equal(packing.experts, before)
