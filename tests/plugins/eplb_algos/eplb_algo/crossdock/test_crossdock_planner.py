"""Planner ``crossdock``: balance, moves, nodes, forecasts."""

from __future__ import annotations

import numpy as np
import pytest
from crossdock.errors import ConfigValueError
from crossdock.placement import balancedness, balancedness_bound, placement_change, plan
from crossdock.testing.expert_loads import LOADS
from crossdock.types.placement import Placement, Topology
from crossdock_eplb_algos._shared.hierarchy import Nodes, slots_outside
from hypothesis import given, settings
from hypothesis import strategies as st

Loads = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
DEEP = (6, 8, 256)
"""Steps, layers and experts of a DeepSeek-V3-like model with few layers."""
MANY_LAYERS = (6, 24, 256)
"""Where means over layers are compared: with eight, chance moves them by half a point."""
BELOW_GLOBAL = {"fast": 0.015, "default": 5e-4, "high": 5e-4}
"""The search stops this near to the bound; the fast effort gives up a little on loads with one very hot expert."""


def _topology(slots: int, gpus: int, nodes: int = 1, groups: int = 1) -> Topology:
    return Topology(num_gpus=gpus, num_nodes=nodes, num_physical_experts=slots, num_groups=groups)


def _balance(placement: Placement, load: Loads, topology: Topology) -> Loads:
    return balancedness(placement, load, topology)


@pytest.mark.parametrize("effort", ["fast", "default", "high"])
@pytest.mark.parametrize("kind", sorted(LOADS))
@pytest.mark.parametrize("gpus", [16, 32, 72])
def test_balance_is_at_least_that_of_global_and_at_most_the_bound(kind: str, gpus: int, effort: str) -> None:
    topology = _topology(288, gpus)
    load = LOADS[kind]((1, 8, 256), 1)[0]
    ours = _balance(plan("crossdock", load, topology, effort=effort), load, topology)
    reference = _balance(plan("global", load, topology), load, topology)
    assert ours.mean() >= reference.mean() - BELOW_GLOBAL[effort]
    assert (ours <= balancedness_bound(load, topology) + 1e-12).all()


@pytest.mark.parametrize(
    ("kind", "slots", "gpus", "mean", "worst"),
    [
        ("hot", 288, 32, 0.998, 0.997),
        ("zipf", 288, 32, 0.999, 0.998),
        ("zipf_steep", 288, 32, 0.989, 0.945),
        ("dead", 288, 32, 0.999, 0.998),
        ("drift", 288, 16, 0.999, 0.998),
        ("drift", 288, 32, 0.999, 0.998),
        ("drift", 288, 72, 0.996, 0.99),
    ],
)
def test_the_default_effort_reaches_its_balance(kind: str, slots: int, gpus: int, mean: float, worst: float) -> None:
    topology = _topology(slots, gpus)
    load = LOADS[kind]((1, 8, 256), 1)[0]
    found = _balance(plan("crossdock", load, topology), load, topology)
    assert found.mean() >= mean
    assert found.min() >= worst


@pytest.mark.parametrize(("experts", "slots", "gpus"), [(8, 16, 8), (8, 12, 4), (32, 48, 16), (32, 40, 8)])
def test_small_models_are_balanced_better_than_by_greedy_counts(experts: int, slots: int, gpus: int) -> None:
    topology = _topology(slots, gpus)
    load = LOADS["topics"]((1, 24, experts), 6)[0]
    ours = _balance(plan("crossdock", load, topology), load, topology)
    reference = _balance(plan("global", load, topology), load, topology)
    assert ours.mean() > reference.mean() + 0.005
    assert (ours >= reference - 1e-9).mean() > 0.9


def test_fast_plans_of_few_experts_search_counts_too() -> None:
    """Two slots a GPU and eight experts: greedy counts alone are worse than DeepSeek's steps."""
    topology = _topology(16, 8)
    load = LOADS["topics"]((1, 24, 8), 6)[0]
    ours, reference = (
        _balance(plan(name, load, topology, **options), load, topology)
        for name, options in (("crossdock", {"effort": "fast"}), ("global", {}))
    )
    assert ours.mean() >= reference.mean()


def test_one_slot_a_gpu_keeps_the_order_of_the_experts() -> None:
    topology = _topology(288, 288)
    steps = LOADS["drift"](DEEP, 1)
    first = plan("crossdock", steps[0], topology)
    assert (first.physical_to_logical[:, :256] == np.arange(256)).all()
    again = plan("crossdock", steps[1], topology)
    assert placement_change(first, again, topology).moved.max() <= 32


def test_the_same_load_gives_the_same_plan_in_whatever_number_of_layers() -> None:
    topology = _topology(288, 32)
    load = LOADS["drift"]((1, 8, 256), 1)[0]
    whole = plan("crossdock", load, topology).physical_to_logical
    assert np.array_equal(plan("crossdock", load, topology).physical_to_logical, whole)


@pytest.mark.parametrize(("gpus", "moves", "now"), [(32, 0.10, 0.98), (72, 0.25, 0.978)])
def test_replanning_on_drift_moves_little_and_is_as_good_on_the_next_window(
    gpus: int, moves: float, now: float
) -> None:
    topology = _topology(288, gpus)
    steps = LOADS["drift"](MANY_LAYERS, 3)
    current = plan("crossdock", steps[0], topology)
    balance, following, fresh_following, moved = [], [], [], []
    for step in range(1, len(steps) - 1):
        fresh = plan("crossdock", steps[step], topology)
        placement = plan("crossdock", steps[step], topology, current)
        balance.append(_balance(placement, steps[step], topology).mean())
        following.append(_balance(placement, steps[step + 1], topology).mean())
        fresh_following.append(_balance(fresh, steps[step + 1], topology).mean())
        moved.append(placement_change(current, placement, topology).moved.mean() / 288)
        current = placement
    assert np.mean(moved) <= moves
    assert np.mean(balance) >= now
    assert np.mean(following) >= np.mean(fresh_following) - 0.003


@pytest.mark.parametrize("most", [0, 1, 8, 28])
def test_a_hard_limit_of_moves_is_kept_in_every_layer_by_weights_and_by_slots(most: int) -> None:
    topology = _topology(288, 32)
    steps = LOADS["drift"](DEEP, 3)
    current = plan("crossdock", steps[0], topology)
    placement = plan("crossdock", steps[5], topology, current, max_moves=most)
    change = placement_change(current, placement, topology)
    assert change.moved.max() <= most
    assert change.slots_changed.tolist() == change.moved.tolist()
    if most == 8:
        assert change.moved.min() == most


def test_a_price_of_moves_trades_balance_for_moves() -> None:
    topology = _topology(288, 32)
    steps = LOADS["drift"](DEEP, 3)
    current = plan("crossdock", steps[0], topology)
    moved = [
        placement_change(
            current, plan("crossdock", steps[5], topology, current, move_price=price), topology
        ).moved.sum()
        for price in (0.0, 0.02, 5.0)
    ]
    assert moved[0] > moved[1] > moved[2] == 0


@pytest.mark.parametrize("options", [{}, {"slack": 0.0}, {"max_moves": 3}, {"effort": "fast"}, {"outside": 0.1}])
@pytest.mark.parametrize("kind", ["drift", "bursty", "topics", "zipf_steep"])
def test_no_layer_becomes_worse_than_under_the_current_placement(kind: str, options: dict[str, object]) -> None:
    topology = _topology(144, 16, nodes=4, groups=8)
    steps = LOADS[kind]((3, 5, 128), 2)
    current = plan("crossdock", steps[0], topology, **options)
    for load in (steps[0], steps[2]):
        before = _balance(current, load, topology)
        after = _balance(plan("crossdock", load, topology, current, **options), load, topology)
        assert (after >= before - 1e-9).all()


def test_planning_again_on_the_same_load_moves_nothing() -> None:
    topology = _topology(288, 32)
    load = LOADS["drift"]((1, 8, 256), 3)[0]
    current = plan("crossdock", load, topology)
    assert np.array_equal(plan("crossdock", load, topology, current).physical_to_logical, current.physical_to_logical)


def test_without_slack_the_balance_of_a_fresh_plan_is_reached_with_fewer_moves() -> None:
    topology = _topology(288, 32)
    steps = LOADS["drift"](DEEP, 3)
    current = plan("crossdock", steps[0], topology)
    fresh = plan("crossdock", steps[5], topology)
    found = plan("crossdock", steps[5], topology, current, slack=0.0)
    assert _balance(found, steps[5], topology).mean() >= _balance(fresh, steps[5], topology).mean() - 1e-6
    moved = [placement_change(current, new, topology).moved.sum() for new in (found, fresh)]
    assert moved[0] < moved[1]


def test_a_layer_without_load_keeps_its_placement() -> None:
    topology = _topology(40, 8)
    load = LOADS["zipf"]((1, 3, 32), 2)[0]
    current = plan("crossdock", load, topology)
    load[1] = 0.0
    found = plan("crossdock", load, topology, current)
    assert np.array_equal(found.physical_to_logical[1], current.physical_to_logical[1])


def test_slots_outside_their_node_stay_within_the_given_part() -> None:
    topology = _topology(144, 16, nodes=4, groups=8)
    load = LOADS["zipf"]((1, 4, 128), 3)[0]
    strict = plan("hierarchical", load, topology)
    found = plan("crossdock", load, topology, outside=0.1)
    assert _balance(found, load, topology).mean() > _balance(strict, load, topology).mean()
    flat = plan("crossdock", load, _topology(144, 16, nodes=4, groups=3), outside=0.1)
    assert "planned flat" in flat.notes[0]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000), st.sampled_from([(2, 18), (4, 22), (8, 40), (3, 29)]), st.sampled_from(["even", "batch"])
)
def test_copies_that_share_a_gpu_are_parted_and_no_layer_becomes_worse(
    seed: int, sizes: tuple[int, int], split: str
) -> None:
    """As placements of other planners may have them."""
    gpus, num_experts = sizes
    rng = np.random.default_rng(seed)
    slots = gpus * (-(-num_experts // gpus) + 1 + seed % 3)
    rest = slots - num_experts
    maps = [rng.permutation([*range(num_experts), *rng.integers(0, num_experts, rest).tolist()]) for _ in range(3)]
    current, topology = Placement.from_physical(np.stack(maps), num_experts), _topology(slots, gpus)
    load = rng.zipf(1.5, (3, num_experts)).clip(0, 500) * float(seed % 7 > 0)
    found = plan("crossdock", load, topology, current, split=split)
    held = (found.physical_to_logical.reshape(3, gpus, -1, 1) == np.arange(num_experts)).sum(axis=2)
    assert not ((held > 1).any(axis=1) & (held == 0).any(axis=1)).any(), "another GPU could have taken a copy"
    assert (_balance(found, load, topology) >= _balance(current, load, topology) - 1e-9).all()


@pytest.mark.parametrize("most", [0, 1, 5, 20])
def test_copies_that_share_a_gpu_are_parted_within_the_limit_of_moves(most: int) -> None:
    rng = np.random.default_rng(most)
    maps = [rng.permutation([*range(32), *rng.integers(0, 32, 16).tolist()]) for _ in range(6)]
    current, topology = Placement.from_physical(np.stack(maps), 32), _topology(48, 4)
    found = plan("crossdock", rng.zipf(1.5, (6, 32)).clip(0, 500), topology, current, max_moves=most)
    assert placement_change(current, found, topology).moved.max() <= most


def test_a_placement_that_is_not_kept_to_nodes_is_left_although_it_is_even() -> None:
    topology = _topology(144, 16, nodes=4, groups=8)
    load = LOADS["zipf"]((1, 4, 128), 3)[0]
    flat = plan("crossdock", load, topology)
    found = plan("crossdock", load, topology, flat, outside=0.1)
    nodes = Nodes(num_groups=8, num_nodes=4, num_gpus=16, num_slots=144, max_outside=14)
    assert slots_outside(flat.physical_to_logical, nodes, 128).min() > nodes.max_outside
    assert slots_outside(found.physical_to_logical, nodes, 128).max() <= nodes.max_outside
    again = plan("crossdock", load, topology, found, outside=0.1)
    assert np.array_equal(again.physical_to_logical, found.physical_to_logical)


def test_a_forecast_beats_the_last_step_by_a_point_where_topics_change() -> None:
    """Plan i from steps up to i, judged on step i + 1."""
    topology = _topology(40, 8)
    steps = LOADS["topics"]((28, 6, 32), 7)
    found = {name: [] for name in ("last", "ewma", "margin", "auto")}
    for step in range(8, len(steps) - 1):
        for name, scores in found.items():
            placement = plan("crossdock", steps[: step + 1], topology, forecast=name, effort="fast")
            scores.append(_balance(placement, steps[step + 1], topology).mean())
    means = {name: np.mean(scores) for name, scores in found.items()}
    assert all(means[name] >= means["last"] + 0.01 for name in ("ewma", "margin", "auto"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"effort": "fats"}, "effort.*did you mean 'fast'"),
        ({"max_moves": -1}, "max_moves must not be negative"),
        ({"decay": 1.5}, "decay must be from 0 to 1"),
        ({"outside": 0.1, "max_moves": 2}, "outside cannot be combined"),
        ({"forecast": "guess"}, "forecast"),
    ],
)
def test_wrong_options_are_refused_with_the_reason(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigValueError, match=message):
        plan("crossdock", [[1.0, 2.0]], _topology(2, 2), **options)


@pytest.mark.parametrize(("algo", "options"), [("crossdock", {"outside": 0.1}), ("hierarchical", {"escape": 0.1})])
@pytest.mark.parametrize("nodes", [1, 2])
def test_more_slots_than_every_gpu_can_take_copies_are_all_filled(
    algo: str, options: dict[str, object], nodes: int
) -> None:
    topology = _topology(12, 2, nodes=nodes, groups=2)
    placement = plan(algo, [[3.0, 1.0]], topology, **options)
    assert set(placement.physical_to_logical[0].tolist()) == {0, 1}
    assert (placement.physical_to_logical >= 0).all()
    if algo == "crossdock":
        assert "12 slots are more than a copy of each of 2 experts on each of 2 GPUs takes (4)" in placement.notes[0]
