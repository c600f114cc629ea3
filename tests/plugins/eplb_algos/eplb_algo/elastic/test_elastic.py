"""Planner ``elastic``: dead GPUs get nothing."""

from __future__ import annotations

import numpy as np
import pytest
from crossdock.errors import ConfigValueError
from crossdock.placement import balancedness, placement_change, plan
from crossdock.testing.expert_loads import LOADS
from crossdock.types.placement import Topology

LOAD = LOADS["zipf"]((1, 3, 16), 5)[0]


def _topology(*dead: int, gpus: int = 8, slots: int = 40) -> Topology:
    return Topology(
        num_gpus=gpus,
        num_nodes=1,
        num_physical_experts=slots,
        active_gpus=tuple(gpu not in dead for gpu in range(gpus)) if dead else None,
    )


@pytest.mark.parametrize("algo", ["elastic", "crossdock"])
@pytest.mark.parametrize("dead", [(0,), (7,), (2, 3, 5)])
def test_replicas_are_on_living_gpus_only_and_balance_is_that_of_a_smaller_cluster(
    algo: str, dead: tuple[int, ...]
) -> None:
    topology = _topology(*dead)
    placement = plan(algo, LOAD, topology)
    listed = placement.logical_to_physical[placement.logical_to_physical >= 0]
    assert not set((listed // 5).tolist()) & set(dead)
    assert placement.replica_counts.min() >= 1
    living = 8 - len(dead)
    smaller = _topology(gpus=living, slots=living * 5)
    np.testing.assert_allclose(
        balancedness(placement, LOAD, topology), balancedness(plan(algo, LOAD, smaller), LOAD, smaller)
    )


def test_with_all_alive_it_plans_as_global_does() -> None:
    topology = _topology()
    assert np.array_equal(
        plan("elastic", LOAD, topology).physical_to_logical, plan("global", LOAD, topology).physical_to_logical
    )


@pytest.mark.parametrize("algo", ["elastic", "crossdock"])
def test_dead_slots_keep_what_they_held_and_expert_zero_without_a_current_placement(algo: str) -> None:
    topology = _topology(2)
    current = plan("global", LOAD, _topology())
    assert (plan(algo, LOAD, topology).physical_to_logical[:, 10:15] == 0).all()
    kept = plan(algo, LOAD, topology, current).physical_to_logical[:, 10:15]
    assert np.array_equal(kept, current.physical_to_logical[:, 10:15])


def test_a_repair_from_the_current_placement_moves_less_than_one_from_nothing() -> None:
    topology = _topology(6)
    current = plan("global", LOAD, _topology())
    fresh = placement_change(current, plan("elastic", LOAD, topology), topology).moved.sum()
    renamed = placement_change(current, plan("elastic", LOAD, topology, current), topology).moved.sum()
    repaired = placement_change(current, plan("crossdock", LOAD, topology, current), topology).moved.sum()
    assert repaired < renamed < fresh


@pytest.mark.parametrize("algo", ["elastic", "crossdock"])
def test_too_many_dead_gpus_are_an_error_with_the_slots_that_would_survive_it(algo: str) -> None:
    topology = _topology(0, 1, 2, 3, 4, gpus=8, slots=40)
    with pytest.raises(ConfigValueError, match="15 slots on 3 living GPUs are fewer than 16 experts; take 48 slots"):
        plan(algo, LOAD, topology)
