"""Packings for pickers that split each batch: as even as others on their own window, and evener on the next one."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from crossdock.placement import balancedness, placement_change, plan
from crossdock.testing.expert_loads import LOADS
from crossdock.types.placement import Placement, Topology
from crossdock_eplb_algos._shared.arrays import Floats
from crossdock_eplb_algos._shared.copy_table import copy_table, loads_without_choice
from crossdock_eplb_algos._shared.kernels.even_shares import even_shares
from crossdock_eplb_algos._shared.links import linked_groups, linked_packing, relink
from crossdock_eplb_algos._shared.packing import Packing
from hypothesis import given, settings
from hypothesis import strategies as st

TOPOLOGY = Topology(num_gpus=32, num_nodes=1, num_physical_experts=288)


def groups_of(slots: list[list[int]]) -> set[frozenset[int]]:
    """Groups of GPUs with common experts, by merging sets: no union-find here."""
    groups = [({gpu}, set(experts)) for gpu, experts in enumerate(slots)]
    merged = True
    while merged:
        merged = False
        for one in groups:
            other = next((each for each in groups if each is not one and each[1] & one[1]), None)
            if other is not None:
                one[0].update(other[0])
                one[1].update(other[1])
                groups.remove(other)
                merged = True
                break
    return {frozenset(gpus) for gpus, _ in groups}


def split_balance(placement: Placement, load: Floats) -> float:
    """Mean over layers of mean over max load when a picker splits the whole window in the best way."""
    found = []
    for layer, tokens in enumerate(load):
        table = copy_table(placement.logical_to_physical[layer], TOPOLOGY)
        counts = torch.from_numpy(tokens.astype(np.int64))
        loads = loads_without_choice(table, counts) + even_shares(counts, table).sum(0)
        found.append(float(loads.mean() / loads.max()))
    return float(np.mean(found))


def test_the_next_window_is_evener_by_two_points_where_batches_are_split() -> None:
    steps = LOADS["drift"]((3, 12, 256), 1) * 100
    for now, following in itertools.pairwise(steps):
        even, linked = (plan("crossdock", now, TOPOLOGY, split=split) for split in ("even", "batch"))
        assert balancedness(linked, now, TOPOLOGY).mean() >= balancedness(even, now, TOPOLOGY).mean() - 0.002
        assert split_balance(linked, following) >= split_balance(even, following) + 0.02


def test_fewer_groups_of_gpus_are_left_alone() -> None:
    load = LOADS["drift"]((1, 4, 256), 1)[0]
    by_split = {}
    for split in ("even", "batch"):
        slots = plan("crossdock", load, TOPOLOGY, split=split).physical_to_logical.reshape(4, 32, 9)
        by_split[split] = sum(len(groups_of(layer.tolist())) for layer in slots)
    assert by_split["batch"] < by_split["even"] / 2


@settings(max_examples=40)
@given(st.integers(2, 8), st.integers(1, 5), st.integers(2, 20), st.integers(0, 1000))
def test_every_expert_is_packed_once_a_gpu_at_most(gpus: int, slots_a_gpu: int, experts: int, seed: int) -> None:
    num_slots = gpus * slots_a_gpu
    experts = min(experts, num_slots)
    if num_slots > gpus * experts:
        return
    load = np.random.default_rng(seed).integers(0, 50, (3, experts)).astype(np.float64)
    packing = linked_packing(load, num_slots, gpus, near=1e-3, tries=8)
    for layer in range(3):
        counts = np.bincount(packing.experts[layer].ravel(), minlength=experts)
        assert counts.min() >= 1
        assert all(len(set(held)) == slots_a_gpu for held in packing.experts[layer].tolist())
        np.testing.assert_allclose(packing.loads[layer], (load[layer] / counts)[packing.experts[layer]], atol=1e-6)


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 12), min_size=2, max_size=2, unique=True), min_size=1, max_size=10))
def test_groups_are_those_of_merged_sets(held: list[list[int]]) -> None:
    group, number = linked_groups(held)
    by_label = {frozenset(np.flatnonzero(group == label).tolist()) for label in group}
    assert by_label == groups_of(held)
    assert number == len(by_label)


def test_relinking_exchanges_copies_below_the_ceiling_and_loses_none() -> None:
    experts = np.array([[[0, 1, 6], [0, 1, 7], [2, 3, 8], [2, 3, 9], [4, 5, 10], [4, 5, 11]]])
    loads = np.tile([2.0, 1.0, 1.0], (1, 6, 1))
    packing = Packing(experts=experts.copy(), loads=loads.copy())
    for ceiling, most, groups in ((3.9, 9, 3), (4.0, 1, 2), (4.0, 9, 1)):
        relink(packing, np.array([ceiling]), np.array([most]), tries=50)
        assert sorted(packing.experts.ravel().tolist()) == sorted(experts.ravel().tolist())
        assert linked_groups(packing.experts[0].tolist())[1] == groups
        assert packing.max_load()[0] <= 4.0


def test_links_are_kept_up_from_placement_to_placement() -> None:
    steps = LOADS["drift"]((7, 8, 256), 1) * 100
    current, following = {}, {"even": [], "batch": []}
    for now, after in itertools.pairwise(steps):
        for split in following:
            placement = plan("crossdock", now, TOPOLOGY, current.get(split), split=split)
            if split in current:
                moved = placement_change(current[split], placement, TOPOLOGY).moved
                assert moved.mean() <= 0.14 * 288
                following[split].append(split_balance(placement, after))
            current[split] = placement
    assert np.mean(following["batch"]) >= np.mean(following["even"]) + 0.01
