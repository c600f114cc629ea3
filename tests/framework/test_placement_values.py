"""Topology, load and placement check themselves; properties of every placement that a planner makes."""

from __future__ import annotations

import numpy as np
import pytest
from crossdock.errors import ConfigValueError, InvalidPlacement
from crossdock.placement import plan
from crossdock.types.placement import ExpertLoad, Placement, Topology
from hypothesis import given, settings
from hypothesis import strategies as st


def test_a_topology_whose_slots_do_not_divide_says_how_many_would() -> None:
    with pytest.raises(ConfigValueError, match="8 slots do not divide over 3 GPUs; take 9 slots"):
        Topology(num_gpus=3, num_nodes=1, num_physical_experts=8)


def test_a_topology_whose_gpus_do_not_divide_over_nodes_is_refused() -> None:
    with pytest.raises(ConfigValueError, match="3 GPUs do not divide over 2 nodes"):
        Topology(num_gpus=3, num_nodes=2, num_physical_experts=9)


@pytest.mark.parametrize("name", ["num_gpus", "num_nodes", "num_physical_experts", "num_groups"])
def test_a_topology_names_the_count_that_is_below_one(name: str) -> None:
    sizes = {"num_gpus": 4, "num_nodes": 2, "num_physical_experts": 8, "num_groups": 2, name: 0}
    with pytest.raises(ConfigValueError, match=f"{name}: must be at least 1, found 0"):
        Topology(**sizes)


@pytest.mark.parametrize("count", [2.5, "2", None])
def test_a_topology_takes_integers_only(count: object) -> None:
    with pytest.raises(ConfigValueError, match=f"num_gpus: must be an integer, found {count!r}"):
        Topology(num_gpus=count, num_nodes=1, num_physical_experts=6)  # type: ignore[arg-type]


@pytest.mark.parametrize("counts", [[["many", "few"]], [[1, 2], [3]], [[1j, 2.0]], [[object(), 1]]])
def test_a_load_of_anything_but_numbers_is_refused(counts: list[list[object]]) -> None:
    with pytest.raises(ConfigValueError, match="load: expected numbers, in rows of equal length"):
        ExpertLoad(counts=counts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "slots",
    [[[0.5, 1.0]], [[float("nan"), 1.0]], [["zero", "one"]], [[0, 1], [0]], [[True, False]], [[2**63, 1]], [[None, 1]]],
    ids=str,
)
def test_slots_of_anything_but_integers_are_refused(slots: list[list[object]]) -> None:
    with pytest.raises(InvalidPlacement, match="slots: expected the integers of logical experts"):
        Placement.from_physical(slots, 2)  # type: ignore[arg-type]


def test_whole_numbers_are_slots_in_whatever_type() -> None:
    for dtype in (np.float64, np.int8, np.uint64):
        slots = np.array([[0, 1, 1]], dtype=dtype)
        assert Placement.from_physical(slots, 2).physical_to_logical.tolist() == [[0, 1, 1]]


def test_a_topology_without_a_living_gpu_or_with_a_short_list_is_refused() -> None:
    with pytest.raises(ConfigValueError, match="no GPU is alive"):
        Topology(num_gpus=2, num_nodes=1, num_physical_experts=4, active_gpus=(False, False))
    with pytest.raises(ConfigValueError, match="1 entries for 2 GPUs"):
        Topology(num_gpus=2, num_nodes=1, num_physical_experts=4, active_gpus=(True,))


def test_slots_of_dead_gpus_are_not_active() -> None:
    topology = Topology(num_gpus=3, num_nodes=1, num_physical_experts=6, active_gpus=(True, False, True))
    assert topology.active_slots.tolist() == [True, True, False, False, True, True]
    assert topology.num_active_gpus == 2


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0])
def test_a_load_names_its_first_bad_count(wrong: float) -> None:
    counts = np.ones((2, 3, 4))
    counts[1, 2, 3] = wrong
    with pytest.raises(
        ConfigValueError,
        match=r"1 counts are negative, not finite or above 2.53, the first at step 1, layer 2, expert 3",
    ):
        ExpertLoad(counts=counts)


@pytest.mark.parametrize("shape", [(0, 2, 4), (2, 0), (4,), (1, 2, 3, 4)])
def test_a_load_of_another_shape_is_refused_with_the_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigValueError, match=r"expected \[steps, layers, experts\]"):
        ExpertLoad(counts=np.ones(shape))


def test_a_load_without_steps_is_one_step_and_steps_are_summed_in_total() -> None:
    assert ExpertLoad(counts=np.ones((2, 4))).counts.shape == (1, 2, 4)
    assert ExpertLoad(counts=np.ones((3, 2, 4))).total.tolist() == [[3.0] * 4] * 2


def test_a_placement_of_a_slot_map_has_replica_lists_in_slot_order() -> None:
    placement = Placement.from_physical([[0, 1, 2, 0], [2, 0, 1, 1]], 3)
    assert placement.logical_to_physical.tolist() == [[[0, 3], [1, -1], [2, -1]], [[1, -1], [2, 3], [0, -1]]]
    assert placement.replica_counts.tolist() == [[2, 1, 1], [1, 2, 1]]


def test_the_width_of_the_replica_lists_can_be_fixed() -> None:
    assert Placement.from_physical([[0, 1, 2, 0]], 3, max_replicas=5).logical_to_physical.shape == (1, 3, 5)
    with pytest.raises(InvalidPlacement, match="an expert has 2 replicas, at most 1 are allowed"):
        Placement.from_physical([[0, 1, 2, 0]], 3, max_replicas=1)


def test_a_slot_map_without_an_expert_is_refused() -> None:
    with pytest.raises(InvalidPlacement, match="layer 1: logical expert 2 has no replica"):
        Placement.from_physical([[0, 1, 2, 0], [0, 1, 1, 0]], 3)


@pytest.mark.parametrize("wrong", [-1, 3])
def test_a_slot_with_an_expert_that_does_not_exist_is_refused(wrong: int) -> None:
    with pytest.raises(InvalidPlacement, match=f"layer 0, slot 3 holds {wrong}: logical experts are 0 to 2"):
        Placement.from_physical([[0, 1, 2, wrong]], 3)


@pytest.mark.parametrize(
    ("lists", "counts", "message"),
    [
        ([[[0, 3], [1, -1], [3, -1]]], [[2, 1, 1]], "slot 3 is listed for logical expert 2 but holds 0"),
        ([[[3, 0], [1, -1], [2, -1]]], [[2, 1, 1]], "slot order"),
        ([[[0, -1], [1, -1], [2, -1]]], [[2, 1, 1]], "not the lengths"),
        ([[[0, 3], [1, -1], [2, -1]]], [[1, 1, 1]], "not the lengths"),
        ([[[0, 3], [1, -1], [2, -1]]], [[2, 1]], "shapes must be"),
    ],
)
def test_arrays_that_contradict_each_other_are_refused(lists: object, counts: object, message: str) -> None:
    with pytest.raises(InvalidPlacement, match=message):
        Placement(
            physical_to_logical=np.array([[0, 1, 2, 0]]),
            logical_to_physical=np.array(lists),
            replica_counts=np.array(counts),
        )


def test_slots_of_dead_gpus_are_in_no_list() -> None:
    active = np.array([True, True, True, False])
    placement = Placement.from_physical([[0, 1, 2, 0]], 3, active_slots=active)
    assert placement.replica_counts.tolist() == [[1, 1, 1]]
    assert 3 not in placement.logical_to_physical


@st.composite
def _problems(draw: st.DrawFn) -> tuple[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]], Topology, bool]:
    num_gpus = draw(st.integers(1, 6))
    per_gpu = draw(st.integers(1, 4))
    num_experts = draw(st.integers(1, num_gpus * per_gpu))
    layers = draw(st.integers(1, 3))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    kind = draw(st.sampled_from(["even", "skewed", "sparse", "zero"]))
    load = rng.integers(0, 20, (layers, num_experts)).astype(np.float64)
    load = {"even": load, "skewed": load**4, "sparse": load * (load > 15), "zero": load * 0}[kind]
    nodes = draw(st.sampled_from([n for n in range(1, num_gpus + 1) if num_gpus % n == 0]))
    groups = draw(st.sampled_from([n for n in range(1, num_experts + 1) if num_experts % n == 0]))
    topology = Topology(num_gpus=num_gpus, num_nodes=nodes, num_physical_experts=num_gpus * per_gpu, num_groups=groups)
    algo = draw(st.sampled_from(["global", "hierarchical", "elastic", "crossdock"]))
    return algo, load, topology, draw(st.booleans())


@settings(max_examples=100, deadline=None, derandomize=True)
@given(_problems())
def test_every_plan_holds_all_experts_fills_all_slots_and_keeps_twins_apart(
    problem: tuple[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]], Topology, bool],
) -> None:
    algo, load, topology, from_current = problem
    current = plan("global", load[:, ::-1].copy(), topology) if from_current else None
    placement = plan(algo, load, topology, current)
    experts = load.shape[1]
    for slots, counts in zip(placement.physical_to_logical, placement.replica_counts, strict=True):
        assert np.bincount(slots, minlength=experts).tolist() == counts.tolist()
        assert counts.min() >= 1
        for gpu in slots.reshape(topology.num_gpus, -1):
            twins = [expert for expert in set(gpu.tolist()) if (gpu == expert).sum() > 1]
            others = slots.reshape(topology.num_gpus, -1)
            # Groups that stay on their node have a node's GPUs to go to, not all.
            if not (algo == "hierarchical" and topology.num_nodes > 1):
                assert all((others == expert).any(axis=1).all() for expert in twins)
    again = Placement.from_physical(placement.physical_to_logical, experts)
    assert np.array_equal(again.logical_to_physical, placement.logical_to_physical)
    assert again.logical_to_physical.shape[2] == topology.num_physical_experts - experts + 1
