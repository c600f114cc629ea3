"""Planner ``global`` against an independent, literal version of the published rules."""

from __future__ import annotations

import numpy as np
import pytest
from crossdock.placement import balancedness, plan
from crossdock.testing.expert_loads import LOADS
from crossdock.types.placement import Topology


def pack_by_loop(weights: list[float], num_packs: int) -> list[list[int]]:
    """Items of each pack: heaviest first, each to the lightest pack that has room; one a pack keeps the order."""
    room = len(weights) // num_packs
    if room == 1:
        return [[item] for item in range(len(weights))]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    totals = [0.0] * num_packs
    for item in sorted(range(len(weights)), key=lambda index: -weights[index]):
        pack = min((p for p in range(num_packs) if len(packs[p]) < room), key=lambda p: totals[p])
        packs[pack].append(item)
        totals[pack] += weights[item]
    return packs


def plan_by_loop(load: list[float], num_slots: int, num_gpus: int) -> list[int]:
    replicas = list(range(len(load)))
    counts = [1] * len(load)
    while len(replicas) < num_slots:
        expert = max(range(len(load)), key=lambda index: load[index] / counts[index])
        replicas.append(expert)
        counts[expert] += 1
    packs = pack_by_loop([load[expert] / counts[expert] for expert in replicas], num_gpus)
    return [replicas[item] for pack in packs for item in pack]


def _distinct(kind: str, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Loads without ties between experts, so that the rules leave one answer."""
    rng = np.random.default_rng(seed)
    return LOADS[kind]((1, 6, 32), seed)[0] + 1.0 + rng.random((6, 32)) * 0.1


@pytest.mark.parametrize("kind", sorted(LOADS))
@pytest.mark.parametrize(("num_slots", "num_gpus"), [(40, 8), (48, 16), (36, 6), (40, 40)])
def test_balance_is_equal_or_better_than_the_reference_on_every_kind_of_load(
    kind: str, num_slots: int, num_gpus: int
) -> None:
    topology = Topology(num_gpus=num_gpus, num_nodes=1, num_physical_experts=num_slots)
    load = _distinct(kind, 8)
    ours = balancedness(plan("global", load, topology), load, topology)
    for layer, row in enumerate(load):
        slots = np.array(plan_by_loop(row.tolist(), num_slots, num_gpus))
        shares = row[slots] / np.bincount(slots, minlength=32)[slots]
        loads = shares.reshape(num_gpus, -1).sum(axis=1)
        assert ours[layer] >= loads.mean() / loads.max() - 1e-12


@pytest.mark.parametrize("kind", ["zipf", "drift", "uniform"])
def test_layers_without_two_copies_on_a_gpu_have_exactly_the_reference_plan(kind: str) -> None:
    topology = Topology(num_gpus=8, num_nodes=1, num_physical_experts=40)
    load = _distinct(kind, 9)
    found = plan("global", load, topology).physical_to_logical
    same = 0
    for row, slots in zip(load, found.tolist(), strict=True):
        expected = plan_by_loop(row.tolist(), 40, 8)
        if all(len(set(gpu)) == 5 for gpu in np.array(expected).reshape(8, 5).tolist()):
            assert slots == expected
            same += 1
    assert same >= 1


def test_one_slot_a_gpu_keeps_the_experts_in_order() -> None:
    topology = Topology(num_gpus=40, num_nodes=1, num_physical_experts=40)
    slots = plan("global", _distinct("zipf", 2), topology).physical_to_logical
    assert (slots[:, :32] == np.arange(32)).all()


def test_steps_of_a_load_are_summed() -> None:
    topology = Topology(num_gpus=8, num_nodes=1, num_physical_experts=40)
    steps = LOADS["drift"]((3, 2, 32), 1)
    assert np.array_equal(
        plan("global", steps, topology).physical_to_logical,
        plan("global", steps.sum(axis=0), topology).physical_to_logical,
    )
