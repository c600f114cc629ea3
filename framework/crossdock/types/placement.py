"""Where experts live: topology, placement, load, and the planner protocol (DESIGN section 10)."""

from __future__ import annotations

from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt


@attrs.frozen(kw_only=True)
class Topology:
    """GPUs, nodes and slots that a placement is made for."""

    num_gpus: int
    num_nodes: int
    num_physical_experts: int
    """Slots over all GPUs; slot s lives on GPU s // (num_physical_experts // num_gpus)."""
    num_groups: int = 1
    active_gpus: tuple[bool, ...] | None = None
    """False for a dead GPU; None when all are alive."""


@attrs.frozen(kw_only=True, eq=False)
class ExpertLoad:
    """Tokens routed to each logical expert: ``counts`` [steps, layers, logical experts] float64 or int64."""

    counts: npt.NDArray[np.float64]


@attrs.frozen(kw_only=True, eq=False)
class Placement:
    """Slots of every layer. L layers, P physical, E logical experts, X = fixed width of the replica lists."""

    physical_to_logical: npt.NDArray[np.int64]
    """[L, P]."""
    logical_to_physical: npt.NDArray[np.int64]
    """[L, E, X] replicas in slot order, padded with -1."""
    replica_counts: npt.NDArray[np.int64]
    """[L, E]."""


class EplbAlgo(Protocol):
    def plan(self, load: ExpertLoad, topology: Topology, current: Placement | None) -> Placement:
        """A valid placement for this load; deterministic, one thread, no collective."""
        ...
