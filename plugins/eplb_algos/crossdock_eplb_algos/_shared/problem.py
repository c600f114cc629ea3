"""What a planner has to solve, with dead GPUs left out, and the placement made of its answer."""

from __future__ import annotations

import attrs
import numpy as np
from crossdock.errors import ConfigValueError
from crossdock.types.placement import Placement, Topology

from crossdock_eplb_algos._shared.arrays import Floats, Ints


@attrs.frozen(kw_only=True, eq=False)
class Problem:
    """Load and sizes of the living part of a topology."""

    load: Floats
    """[L, E] float64; its scale has no meaning."""
    num_gpus: int
    num_slots: int
    topology: Topology
    current: Ints | None
    """[L, P of the living] slot map in force; experts may be missing from it when GPUs died."""

    @property
    def is_whole(self) -> bool:
        """No GPU is dead."""
        return self.num_gpus == self.topology.num_gpus


def make_problem(load: Floats, topology: Topology, current: Placement | None, *, dead_gpus_allowed: bool) -> Problem:
    """The problem of planning ``load`` [L, E].

    Raises:
        ConfigValueError: too few slots, a dead GPU where the planner cannot leave one out, or a ``current`` of other sizes.
    """
    num_layers, num_experts = load.shape
    num_gpus = topology.num_active_gpus
    num_slots = num_gpus * topology.slots_per_gpu
    if num_gpus < topology.num_gpus and not dead_gpus_allowed:
        raise ConfigValueError(
            [
                f"{topology.num_gpus - num_gpus} GPUs are dead: take the planner 'elastic' or 'crossdock', this one needs all"
            ]
        )
    if num_slots < num_experts:
        needed = -(-num_experts // num_gpus) * topology.num_gpus
        raise ConfigValueError(
            [
                f"{num_slots} slots on {num_gpus} living GPUs are fewer than {num_experts} experts; take {needed} slots"
                f" ({max(0, needed - num_experts)} redundant experts) or more"
            ]
        )
    if current is not None:
        found = (current.num_layers, current.num_physical_experts, current.num_logical_experts)
        wanted = (num_layers, topology.num_physical_experts, num_experts)
        if found != wanted:
            raise ConfigValueError(
                [
                    "the current placement has {} layers, {} slots and {} experts; the load and the topology have {}, {} and {}".format(
                        *found, *wanted
                    )
                ]
            )
    return Problem(
        load=load,
        num_gpus=num_gpus,
        num_slots=num_slots,
        topology=topology,
        current=None if current is None else current.physical_to_logical[:, topology.active_slots],
    )


def make_placement(slots: Ints, problem: Problem, current: Placement | None, notes: tuple[str, ...] = ()) -> Placement:
    """The placement of all GPUs from the slot map [L, P of the living] of the living ones.

    Dead slots keep what ``current`` has there, expert 0 without one; no replica list names them.
    """
    topology, num_experts = problem.topology, problem.load.shape[1]
    if problem.is_whole:
        return Placement.from_physical(slots, num_experts, notes=notes)
    shape = (len(slots), topology.num_physical_experts)
    everywhere = np.zeros(shape, dtype=np.int64) if current is None else current.physical_to_logical.copy()
    everywhere[:, topology.active_slots] = slots
    return Placement.from_physical(everywhere, num_experts, active_slots=topology.active_slots, notes=notes)
