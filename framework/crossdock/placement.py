"""Typed entry to the ``eplb_algo`` point, and what a placement is worth under a load.

All numbers assume that the replicas of an expert share its tokens evenly. Layers are independent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import attrs
import numpy as np
import numpy.typing as npt

from crossdock.errors import InvalidPlacement
from crossdock.plugin_call import build
from crossdock.registry import load_plugin
from crossdock.types.placement import EplbAlgo, ExpertLoad, Placement, Topology

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def make_eplb_algo(name: str, options: Mapping[str, object]) -> EplbAlgo:
    """The planner ``name``.

    Raises:
        PluginError: it cannot be loaded, declines, or returns an object without the protocol's methods.
        ConfigValueError: an option is wrong.
    """
    algo: EplbAlgo = build(load_plugin("eplb_algo", name), EplbAlgo, options=options)
    return algo


def plan(
    algo: str,
    load: ExpertLoad | npt.ArrayLike,
    topology: Topology,
    current: Placement | npt.ArrayLike | None = None,
    **options: object,
) -> Placement:
    """A placement made by the planner ``algo``.

    Args:
        algo: name of an ``eplb_algo`` plugin, for instance ``"crossdock"``.
        load: counts [layers, logical experts] or [steps, layers, logical experts]; numbers of any type, torch tensors too.
        topology: GPUs, nodes and slots; ``active_gpus`` for dead ones.
        current: the placement in force, or its slot map [layers, slots]; planners that mind moves start from it.
        options: the planner's own options.

    Raises:
        PluginError: the planner cannot be loaded.
        ConfigValueError: the load, the sizes or an option cannot be used; says what to change.
        InvalidPlacement: ``current`` is not a placement, or a planner returned one that does not fit.
    """
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in options.items()}
    planner = make_eplb_algo(algo, plain)
    expert_load = load if isinstance(load, ExpertLoad) else ExpertLoad(counts=_host_array(load))
    if current is not None and not isinstance(current, Placement):
        current = Placement.from_physical(_host_array(current), expert_load.num_logical_experts)
    placement = planner.plan(expert_load, topology, current)
    check_fits(placement, topology, num_layers=expert_load.num_layers, num_experts=expert_load.num_logical_experts)
    return placement


def trivial_placement(num_layers: int, num_logical_experts: int, num_physical_experts: int) -> Placement:
    """Slot i holds expert i mod E, in every layer: the placement before anything was planned."""
    slots = np.arange(num_physical_experts, dtype=np.int64) % num_logical_experts
    return Placement.from_physical(np.tile(slots, (num_layers, 1)), num_logical_experts)


def _host_array(values: object) -> npt.ArrayLike:
    """Arrays as they are; tensors by way of the host, in a type that numpy has."""
    if hasattr(values, "detach"):
        tensor = cast("Any", values).detach().cpu()
        return cast("npt.ArrayLike", (tensor.double() if tensor.is_floating_point() else tensor).numpy())
    return cast("npt.ArrayLike", values)


def check_fits(placement: Placement, topology: Topology, *, num_layers: int, num_experts: int) -> None:
    """Raises ``InvalidPlacement`` unless the placement is one for this topology and has living replicas of all experts."""
    found = (placement.num_layers, placement.num_physical_experts, placement.num_logical_experts)
    wanted = (num_layers, topology.num_physical_experts, num_experts)
    if found != wanted:
        raise InvalidPlacement(
            f"the placement has {found[0]} layers, {found[1]} slots and {found[2]} experts, wanted {wanted[0]},"
            f" {wanted[1]} and {wanted[2]}"
        )
    if topology.active_gpus is not None:
        listed = placement.logical_to_physical
        dead = ~topology.active_slots
        if dead[listed[listed >= 0]].any():
            raise InvalidPlacement("a replica list names a slot of a dead GPU")
        return
    if int(placement.replica_counts.sum()) != placement.physical_to_logical.size:
        raise InvalidPlacement("slots are missing from the replica lists although all GPUs are alive")


def gpu_loads(placement: Placement, load: Floats, topology: Topology) -> Floats:
    """Load of each GPU [L, G] under ``load`` [L, E]; dead GPUs have none."""
    per_copy = load / placement.replica_counts
    slot_load = np.take_along_axis(per_copy, placement.physical_to_logical, axis=1)
    if topology.active_gpus is not None:
        slot_load = slot_load * topology.active_slots
    loads: Floats = slot_load.reshape(len(load), topology.num_gpus, -1).sum(axis=2)
    return loads


def balancedness(placement: Placement, load: Floats, topology: Topology) -> Floats:
    """Mean over max load of the living GPUs [L]; 1 is perfect, and a layer without load has 1."""
    loads = gpu_loads(placement, load, topology)
    return _mean_over(loads.sum(axis=1) / topology.num_active_gpus, loads.max(axis=1))


def balancedness_bound(load: Floats, topology: Topology) -> Floats:
    """Balancedness [L] that no placement can pass: mean over max(mean, best possible hottest replica)."""
    num_slots = topology.num_active_gpus * topology.slots_per_gpu
    mean = load.sum(axis=1) / topology.num_active_gpus
    counts = np.ones_like(load)
    row = np.arange(len(load))
    for _ in range(num_slots - load.shape[1]):
        counts[row, (load / counts).argmax(axis=1)] += 1
    return _mean_over(mean, np.maximum(mean, (load / counts).max(axis=1)))


def _mean_over(mean: Floats, peak: Floats) -> Floats:
    return np.divide(mean, peak, out=np.ones_like(mean), where=peak > 0)


@attrs.frozen(kw_only=True, eq=False)
class PlacementChange:
    """What lies between two placements of the same sizes."""

    moved: Ints
    """[L] (GPU, expert) weights of the new placement that the GPU does not hold in the old one: what has to be loaded."""
    slots_changed: Ints
    """[L] slots whose expert differs; larger than ``moved`` when experts only changed places on their GPU."""
    replicas_changed: Ints
    """[L] experts with another replica count."""


def placement_change(old: Placement, new: Placement, topology: Topology) -> PlacementChange:
    """Compare two placements.

    Raises:
        InvalidPlacement: they have different sizes, or do not fit the topology.
    """
    for placement in (old, new):
        check_sizes(placement, old, topology)
    shape = (old.num_layers, topology.num_gpus, -1)
    held = [np.zeros((old.num_layers, topology.num_gpus, old.num_logical_experts), dtype=np.bool_) for _ in range(2)]
    for member, placement in zip(held, (old, new), strict=True):
        np.put_along_axis(member, placement.physical_to_logical.reshape(shape), True, axis=2)
    return PlacementChange(
        moved=(held[1] & ~held[0]).sum(axis=(1, 2)),
        slots_changed=(old.physical_to_logical != new.physical_to_logical).sum(axis=1),
        replicas_changed=(old.replica_counts != new.replica_counts).sum(axis=1),
    )


def check_sizes(placement: Placement, other: Placement, topology: Topology) -> None:
    """Raises ``InvalidPlacement`` unless both have the same sizes and the topology's slots."""
    shapes = [(p.physical_to_logical.shape, p.num_logical_experts) for p in (placement, other)]
    if shapes[0] != shapes[1] or placement.num_physical_experts != topology.num_physical_experts:
        raise InvalidPlacement(
            f"placements of {shapes[0][0]} slots and {shapes[1][0]} slots ([layers, slots]; {shapes[0][1]} and"
            f" {shapes[1][1]} experts) cannot be compared on {topology.num_physical_experts} slots"
        )
