"""What must hold for a placement planner: every expert placed, every slot filled, the same plan each time, on any load."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import attrs
import numpy as np
import numpy.typing as npt

from crossdock.placement import make_eplb_algo
from crossdock.testing.conformance import PluginCase, check_of
from crossdock.types.placement import ExpertLoad, Placement, Topology


@attrs.frozen(kw_only=True)
class _Shape:
    num_layers: int
    num_logical_experts: int
    topology: Topology


_SHAPES = (
    _Shape(num_layers=1, num_logical_experts=1, topology=Topology(num_gpus=1, num_nodes=1, num_physical_experts=1)),
    _Shape(num_layers=2, num_logical_experts=8, topology=Topology(num_gpus=1, num_nodes=1, num_physical_experts=8)),
    _Shape(num_layers=2, num_logical_experts=8, topology=Topology(num_gpus=4, num_nodes=1, num_physical_experts=12)),
    _Shape(
        num_layers=3,
        num_logical_experts=16,
        topology=Topology(num_gpus=4, num_nodes=2, num_physical_experts=24, num_groups=4),
    ),
    _Shape(num_layers=1, num_logical_experts=32, topology=Topology(num_gpus=8, num_nodes=2, num_physical_experts=64)),
)


def _loads(shape: _Shape) -> Iterator[tuple[str, npt.NDArray[np.float64]]]:
    rng = np.random.default_rng(7)
    size = (2, shape.num_layers, shape.num_logical_experts)
    skewed = 1000.0 / np.arange(1, shape.num_logical_experts + 1) ** 1.2
    one_hot = np.zeros(size)
    one_hot[..., -1] = 5.0
    half_dead = rng.integers(0, 50, size).astype(np.float64)
    half_dead[..., ::2] = 0.0
    yield "uniform", np.ones(size)
    yield "skewed", np.broadcast_to(rng.permutation(skewed), size).copy()
    yield "one expert only", one_hot
    yield "half of the experts dead", half_dead
    yield "all zero", np.zeros(size)


def _plan(case: PluginCase, shape: _Shape, counts: npt.NDArray[np.float64], current: Placement | None) -> Placement:
    planner = make_eplb_algo(case.name, case.options)
    return planner.plan(ExpertLoad(counts=counts), shape.topology, current)


def _check_valid(placement: Placement, shape: _Shape, what: str) -> None:
    physical = placement.physical_to_logical
    layers, experts, slots = shape.num_layers, shape.num_logical_experts, shape.topology.num_physical_experts
    assert physical.shape == (layers, slots), (
        f"{what}: physical_to_logical is {physical.shape}, expected {(layers, slots)}"
    )
    for layer in range(layers):
        found = np.bincount(physical[layer], minlength=experts)
        assert physical[layer].min() >= 0, f"{what}: layer {layer} has an empty slot"
        assert len(found) == experts, f"{what}: layer {layer} places an expert that does not exist"
        assert found.min() >= 1, f"{what}: layer {layer} misses expert {int(found.argmin())}"
        np.testing.assert_array_equal(placement.replica_counts[layer], found, err_msg=what)
        for expert in range(experts):
            replicas = placement.logical_to_physical[layer, expert]
            np.testing.assert_array_equal(
                np.sort(replicas[replicas >= 0]), np.flatnonzero(physical[layer] == expert), err_msg=what
            )


def check_a_plan_places_every_expert_and_fills_every_slot(case: PluginCase) -> None:
    for shape in _SHAPES:
        for name, counts in _loads(shape):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                _check_valid(_plan(case, shape, counts, None), shape, f"{name} load, {shape}")


def check_a_plan_on_top_of_a_placement_is_valid(case: PluginCase) -> None:
    for shape in _SHAPES:
        loads = dict(_loads(shape))
        current = _plan(case, shape, loads["uniform"], None)
        for name, counts in loads.items():
            _check_valid(_plan(case, shape, counts, current), shape, f"{name} load after uniform, {shape}")


def check_the_same_load_gives_the_same_plan(case: PluginCase) -> None:
    for shape in _SHAPES:
        for name, counts in _loads(shape):
            first, second = (_plan(case, shape, counts.copy(), None) for _ in range(2))
            np.testing.assert_array_equal(first.physical_to_logical, second.physical_to_logical, err_msg=name)


def check_planning_leaves_the_load_as_it_is(case: PluginCase) -> None:
    shape = _SHAPES[2]
    for name, counts in _loads(shape):
        before = counts.copy()
        _plan(case, shape, counts, None)
        np.testing.assert_array_equal(counts, before, err_msg=name)


CHECKS = (
    check_of(check_a_plan_places_every_expert_and_fills_every_slot),
    check_of(check_a_plan_on_top_of_a_placement_is_valid),
    check_of(check_the_same_load_gives_the_same_plan),
    check_of(check_planning_leaves_the_load_as_it_is),
)
