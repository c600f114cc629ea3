"""Verbs of live placement: what lies where, what loads were counted, move to another placement, what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from crossdock.control_verbs import Verb
from crossdock.eplb.load_segments import LoadSegments
from crossdock.eplb.manager import EplbManager
from crossdock.eplb.reload import ExpertReload
from crossdock.errors import ConfigValueError, RuntimeFault
from crossdock.placement_io.content import as_array
from crossdock.types.comm import GroupComm
from crossdock.types.location import PlacementMaps
from crossdock.types.placement import Placement, Topology

_OFF = "eplb.enabled is false: no spare slots were set aside at start, so experts cannot move; start with eplb.enabled = true"


@attrs.frozen(kw_only=True, eq=False)
class PlacementVerbs:
    """Bound to one rank. Without a manager the placement can be looked at only."""

    maps: PlacementMaps
    topology: Topology
    layers: Sequence[int]
    """Model layer numbers of the maps' rows."""
    expert_bytes: int
    """Of one expert on one rank, over all its tensors."""
    world: GroupComm
    manager: EplbManager | None = None
    segments: LoadSegments | None = None
    expert_reload: ExpertReload | None = None
    """None where the model cannot read its experts again."""

    def local(self) -> Mapping[str, Verb]:
        """What a leader answers alone."""
        return {"placement": self.placement, "placement_history": self.history}

    def together(self) -> Mapping[str, Verb]:
        """What every rank executes between the same two steps."""
        return {"placement_load": self.load, "placement_apply": self.apply, "placement_reload": self.reload}

    def placement(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The placement in force, and what is under way."""
        progress = None if self.manager is None else self.manager.progress
        return {
            "physical_to_logical_map": self.maps.host.physical_to_logical.tolist(),
            "num_logical_experts": self.maps.replica_counts.shape[1],
            "max_replicas": self.maps.logical_to_physical.shape[2],
            "layers": list(self.layers),
            "expert_bytes": self.expert_bytes,
            "config": {
                "num_gpus": self.topology.num_gpus,
                "num_nodes": self.topology.num_nodes,
                "num_physical_experts": self.topology.num_physical_experts,
                "num_groups": self.topology.num_groups,
            },
            "can_move": self.manager is not None,
            "is_moving": progress is not None,
            "progress": "" if progress is None else progress.describe(),
        }

    def history(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Rebalances that ended, oldest first."""
        return {"entries": [] if self.manager is None else [dict(entry) for entry in self.manager.log.entries]}

    def load(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Counts since the last decision, over all ranks; a collective."""
        if self.segments is None:
            raise ConfigValueError([_OFF])
        totals = self.segments.totals(self.world)
        return {"passes": self.segments.num_passes, "load": totals.counts.sum(0).tolist()}

    def apply(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Starts to move to ``physical_to_logical_map``; refused while a rebalance is under way."""
        if self.manager is None:
            raise ConfigValueError([_OFF])
        slots = as_array(arguments["physical_to_logical_map"], where="physical_to_logical_map", dims=(2,), integer=True)
        placement = Placement.from_physical(slots, self.maps.replica_counts.shape[1])
        try:
            self.manager.apply(placement, str(arguments.get("reason") or "asked for over HTTP"))
        except RuntimeFault as busy:
            return {"accepted": False, "reason": str(busy)}
        return {"accepted": True, "layers": len(self.manager.live.changed_layers(placement))}

    def reload(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Reads all experts from the checkpoint again, under the placement in force; refused while a rebalance is under way."""
        if self.expert_reload is None:
            raise ConfigValueError(["this model cannot read its experts again; start the server anew"])
        if self.manager is not None and self.manager.progress is not None:
            reason = f"a rebalance is under way ({self.manager.progress.describe()}); ask again when it has ended, see /placement"
            return {"accepted": False, "reason": reason}
        return {"accepted": True, "slots": self.expert_reload.run()}
