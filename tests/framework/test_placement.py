"""The typed entry ``plan`` and the numbers about a placement."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from crossdock.errors import ConfigValueError, InvalidPlacement, UnknownPlugin
from crossdock.placement import (
    balancedness,
    balancedness_bound,
    check_fits,
    gpu_loads,
    make_eplb_algo,
    placement_change,
    plan,
)
from crossdock.types.placement import Placement, Topology

TWO_GPUS = Topology(num_gpus=2, num_nodes=1, num_physical_experts=4)
ALGOS = ("global", "hierarchical", "elastic", "crossdock")


def test_gpu_loads_share_an_expert_evenly_over_its_replicas() -> None:
    placement = Placement.from_physical([[0, 1, 0, 2]], 3)
    loads = gpu_loads(placement, np.array([[6.0, 1.0, 5.0]]), TWO_GPUS)
    assert loads.tolist() == [[4.0, 8.0]]
    assert balancedness(placement, np.array([[6.0, 1.0, 5.0]]), TWO_GPUS).tolist() == [0.75]


def test_dead_gpus_have_no_load_and_do_not_count_in_the_mean() -> None:
    topology = Topology(num_gpus=3, num_nodes=1, num_physical_experts=3, active_gpus=(True, False, True))
    placement = Placement.from_physical([[0, 0, 1]], 2, active_slots=topology.active_slots)
    assert gpu_loads(placement, np.array([[6.0, 2.0]]), topology).tolist() == [[6.0, 0.0, 2.0]]
    assert balancedness(placement, np.array([[6.0, 2.0]]), topology).tolist() == [4.0 / 6.0]


def test_a_layer_without_load_has_balancedness_one() -> None:
    placement = Placement.from_physical([[0, 1, 0, 2]], 3)
    assert balancedness(placement, np.zeros((1, 3)), TWO_GPUS).tolist() == [1.0]
    assert balancedness_bound(np.zeros((1, 3)), TWO_GPUS).tolist() == [1.0]


def test_the_bound_is_the_best_over_all_replica_counts() -> None:
    load = np.array([[10.0, 3.0, 1.0]])
    splits = [(a, b, 4 - a - b) for a in range(1, 3) for b in range(1, 4 - a)]
    hottest = min(max(load[0] / np.array(split)) for split in splits)
    assert balancedness_bound(load, TWO_GPUS).tolist() == [7.0 / max(7.0, hottest)]


def test_moved_weights_are_counted_by_gpu_and_not_by_slot() -> None:
    old = Placement.from_physical([[0, 1, 2, 0]], 3)
    swapped_inside = Placement.from_physical([[1, 0, 2, 0]], 3)
    change = placement_change(old, swapped_inside, TWO_GPUS)
    assert (change.moved.tolist(), change.slots_changed.tolist()) == ([0], [2])
    other = Placement.from_physical([[0, 1, 2, 1]], 3)
    change = placement_change(old, other, TWO_GPUS)
    assert (change.moved.tolist(), change.replicas_changed.tolist()) == ([1], [2])


def test_placements_of_different_sizes_cannot_be_compared() -> None:
    with pytest.raises(InvalidPlacement, match="cannot be compared"):
        placement_change(
            Placement.from_physical([[0, 1, 2, 0]], 3), Placement.from_physical([[0, 1, 2, 0, 1, 2]], 3), TWO_GPUS
        )


def test_an_unknown_planner_names_the_nearest_one() -> None:
    with pytest.raises(UnknownPlugin, match="did you mean 'crossdock'"):
        plan("crosdock", [[1, 2]], TWO_GPUS)


def test_an_unknown_option_names_the_accepted_ones() -> None:
    with pytest.raises(ConfigValueError, match=r"unknown key 'max_move'.*max_moves"):
        make_eplb_algo("crossdock", {"max_move": 3})


def test_options_may_be_numbers_of_numpy() -> None:
    load, current = [[9.0, 1.0, 1.0]], [[0, 1, 2, 2]]
    found = plan("crossdock", load, TWO_GPUS, current, max_moves=np.int64(1), slack=np.float32(0.0))
    expected = plan("crossdock", load, TWO_GPUS, current, max_moves=1, slack=0.0)
    assert np.array_equal(found.physical_to_logical, expected.physical_to_logical)


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_loads_may_be_tensors_of_any_type(algo: str, dtype: torch.dtype) -> None:
    load = torch.tensor([[4, 2, 1]]).to(dtype)
    from_list = plan(algo, [[4.0, 2.0, 1.0]], TWO_GPUS)
    assert np.array_equal(plan(algo, load, TWO_GPUS).physical_to_logical, from_list.physical_to_logical)


@pytest.mark.parametrize("algo", ALGOS)
def test_fewer_slots_than_experts_is_an_error_with_the_number_needed(algo: str) -> None:
    with pytest.raises(
        ConfigValueError, match=r"4 slots on 2 living GPUs are fewer than 5 experts; take 6 slots \(1 redundant"
    ):
        plan(algo, np.ones((1, 5)), TWO_GPUS)


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("bad", [[[np.nan, 1.0]], [[-1.0, 1.0]], [[]]])
def test_a_load_that_cannot_be_planned_is_an_error(algo: str, bad: list[list[float]]) -> None:
    with pytest.raises(ConfigValueError, match="load:"):
        plan(algo, bad, TWO_GPUS)


@pytest.mark.parametrize("algo", ALGOS)
def test_a_current_placement_of_other_sizes_is_an_error(algo: str) -> None:
    with pytest.raises(ConfigValueError, match="the current placement has 1 layers, 3 slots and 3 experts"):
        plan(algo, np.ones((1, 3)), TWO_GPUS, [[0, 1, 2]])


@pytest.mark.parametrize("algo", ALGOS)
def test_one_gpu_takes_everything(algo: str) -> None:
    topology = Topology(num_gpus=1, num_nodes=1, num_physical_experts=5)
    placement = plan(algo, [[5.0, 1.0, 1.0]], topology)
    assert sorted(set(placement.physical_to_logical[0].tolist())) == [0, 1, 2]


@pytest.mark.parametrize("algo", ["global", "hierarchical"])
def test_planners_that_need_all_gpus_say_so(algo: str) -> None:
    topology = Topology(num_gpus=2, num_nodes=1, num_physical_experts=4, active_gpus=(True, False))
    with pytest.raises(ConfigValueError, match="take the planner 'elastic' or 'crossdock'"):
        plan(algo, [[1.0, 1.0]], topology)


def test_a_plan_that_lists_a_dead_gpu_does_not_fit() -> None:
    topology = Topology(num_gpus=2, num_nodes=1, num_physical_experts=4, active_gpus=(True, False))
    with pytest.raises(InvalidPlacement, match="dead GPU"):
        check_fits(Placement.from_physical([[0, 1, 0, 1]], 2), topology, num_layers=1, num_experts=2)


def test_a_plan_that_leaves_out_living_slots_does_not_fit() -> None:
    placement = Placement.from_physical([[0, 1, 0, 1]], 2, active_slots=np.array([True, True, False, False]))
    with pytest.raises(InvalidPlacement, match="although all GPUs are alive"):
        check_fits(placement, TWO_GPUS, num_layers=1, num_experts=2)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("algo", ALGOS)
def test_a_plan_does_not_depend_on_torch_threads(algo: str, threads: int) -> None:
    load = np.random.default_rng(3).integers(0, 1000, (4, 12))
    topology = Topology(num_gpus=4, num_nodes=2, num_physical_experts=16, num_groups=4)
    expected = plan(algo, load, topology).physical_to_logical
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert np.array_equal(plan(algo, load, topology).physical_to_logical, expected)
    finally:
        torch.set_num_threads(before)
