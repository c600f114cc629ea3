"""Slots away from the node of their group, counted off a map, against the best assignment that a solver finds."""

from __future__ import annotations

import numpy as np
from crossdock_eplb_algos._shared.hierarchy import Nodes, slots_outside
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([(2, 1), (2, 2), (3, 2), (4, 1)]))
def test_no_fewer_slots_are_outside_than_under_the_best_homes(seed: int, sizes: tuple[int, int]) -> None:
    num_nodes, groups_a_node = sizes
    num_groups, rng = num_nodes * groups_a_node, np.random.default_rng(seed)
    num_experts, num_slots = 3 * num_groups, 5 * num_groups
    nodes = Nodes(num_groups=num_groups, num_nodes=num_nodes, num_gpus=num_nodes, num_slots=num_slots, max_outside=0)
    slots = rng.integers(0, num_experts, (2, num_slots))
    found = slots_outside(slots, nodes, num_experts)
    for row, outside in zip(slots, found, strict=True):
        together = np.zeros((num_groups, num_nodes), dtype=np.int64)
        np.add.at(together, (row // 3, np.arange(num_slots) // (num_slots // num_nodes)), 1)
        at = linear_sum_assignment(-np.repeat(together, groups_a_node, axis=1))
        assert outside >= num_slots - np.repeat(together, groups_a_node, axis=1)[at].sum()


def test_where_groups_are_at_home_nothing_is_outside() -> None:
    nodes = Nodes(num_groups=4, num_nodes=2, num_gpus=4, num_slots=12, max_outside=0)
    # Groups of two experts: 0 and 3 on the first node, 1 and 2 on the second.
    first, second = [0, 1, 6, 7, 0, 6], [2, 3, 4, 5, 2, 5]
    assert slots_outside(np.array([first + second, second + first]), nodes, 8).tolist() == [0, 0]
    assert slots_outside(np.array([[0, 1, 6, 7, 0, 2, 6, 3, 4, 5, 2, 5]]), nodes, 8).tolist() == [2]
