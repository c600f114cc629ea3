"""Planner ``hierarchical``: golden plan, groups on nodes, escape, sizes that do not divide."""

from __future__ import annotations

import numpy as np
import pytest
from crossdock.placement import balancedness, plan
from crossdock.testing.expert_loads import LOADS
from crossdock.types.placement import Placement, Topology

GOLDEN_LOAD = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
GOLDEN_SLOTS = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]
FOUR_NODES = Topology(num_gpus=16, num_nodes=4, num_physical_experts=144, num_groups=8)


def _slots_outside(placement: Placement, topology: Topology) -> list[int]:
    """Per layer, the least number of slots outside their group's node over all choices of home nodes by majority."""
    experts_a_group = placement.num_logical_experts // topology.num_groups
    groups = placement.physical_to_logical // experts_a_group
    nodes = np.arange(topology.num_physical_experts) // (topology.num_physical_experts // topology.num_nodes)
    outside = []
    for row in groups:
        held = np.array(
            [
                [(row[nodes == node] == group).sum() for node in range(topology.num_nodes)]
                for group in range(topology.num_groups)
            ]
        )
        outside.append(int(held.sum() - held.max(axis=1).sum()))
    return outside


def test_the_golden_plan() -> None:
    """Golden value A1 of the facts."""
    topology = Topology(num_gpus=8, num_nodes=2, num_physical_experts=16, num_groups=4)
    placement = plan("hierarchical", GOLDEN_LOAD, topology)
    assert placement.physical_to_logical.tolist() == GOLDEN_SLOTS
    assert placement.replica_counts.tolist() == [
        [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1],
        [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1],
    ]
    assert placement.notes == ()


@pytest.mark.parametrize("kind", ["zipf", "hot", "drift"])
def test_without_escape_every_group_stays_on_one_node(kind: str) -> None:
    load = LOADS[kind]((1, 4, 128), 3)[0]
    assert _slots_outside(plan("hierarchical", load, FOUR_NODES), FOUR_NODES) == [0] * 4


@pytest.mark.parametrize("escape", [0.03, 0.1])
@pytest.mark.parametrize("kind", ["zipf", "zipf_steep", "hot", "dead", "drift", "bursty"])
def test_an_escape_improves_balance_within_its_limit(kind: str, escape: float) -> None:
    load = LOADS[kind]((1, 4, 128), 3)[0]
    strict = balancedness(plan("hierarchical", load, FOUR_NODES), load, FOUR_NODES)
    escaping = plan("hierarchical", load, FOUR_NODES, escape=escape)
    assert max(_slots_outside(escaping, FOUR_NODES)) <= int(escape * 144)
    assert balancedness(escaping, load, FOUR_NODES).mean() > strict.mean()


def test_ten_percent_outside_reach_ninety_seven_percent_balance_where_groups_are_uneven() -> None:
    rng = np.random.default_rng(1)
    # Groups whose loads differ, as in the measured model: strict hierarchy cannot split them evenly over four nodes.
    group = np.repeat(np.exp(rng.normal(size=(6, 8)) * 0.35), 32, axis=1)
    load = np.exp(rng.normal(size=(6, 256)) * 0.8) * group
    topology = Topology(num_gpus=32, num_nodes=4, num_physical_experts=288, num_groups=8)
    strict = balancedness(plan("hierarchical", load, topology), load, topology).mean()
    escaping = plan("hierarchical", load, topology, escape=0.1)
    assert strict < 0.95
    assert balancedness(escaping, load, topology).mean() >= 0.97
    assert max(_slots_outside(escaping, topology)) <= 28


@pytest.mark.parametrize(
    ("gpus", "nodes", "groups", "experts"), [(3, 3, 4, 8), (4, 4, 1, 8), (6, 3, 4, 8), (4, 2, 3, 8)]
)
def test_sizes_that_do_not_divide_are_planned_flat_with_a_note_that_names_the_rules(
    gpus: int, nodes: int, groups: int, experts: int
) -> None:
    topology = Topology(num_gpus=gpus, num_nodes=nodes, num_physical_experts=gpus * 4, num_groups=groups)
    load = np.arange(1.0, experts + 1)[None]
    placement = plan("hierarchical", load, topology)
    assert "experts divide over groups, groups over nodes and GPUs over nodes" in placement.notes[0]
    assert np.array_equal(placement.physical_to_logical, plan("global", load, topology).physical_to_logical)
