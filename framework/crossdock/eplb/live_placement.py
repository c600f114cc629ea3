"""The placement in force on one rank, and the switch of a layer between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt
import torch

from crossdock.eplb.layer_plan import LayerPlan, MoveBudget
from crossdock.eplb.layer_transfer import LayerTransfer
from crossdock.eplb.orders import LayerOrder, Numbers, PlanOrder
from crossdock.eplb.prediction import Rates
from crossdock.eplb.spare_slots import SpareSlots, moved_tensors
from crossdock.eplb.transfer import SliceCarrier
from crossdock.errors import InvalidPlacement
from crossdock.location import overwrite_layer
from crossdock.placement import check_fits
from crossdock.types.experts import Experts, ExpertTensors
from crossdock.types.location import Picker, PlacementMaps
from crossdock.types.model import ExpertReader
from crossdock.types.placement import Placement, Topology


class LayerCounters(Protocol):
    """Counts by physical expert that must be turned logical before a layer's map changes."""

    def flush_layer(self, layer: int) -> None: ...


@attrs.define(kw_only=True, eq=False)
class LivePlacement:
    """Maps, expert tensors and everything that is derived from them. Addresses and shapes never change."""

    topology: Topology
    maps: PlacementMaps
    tensors: Sequence[ExpertTensors]
    """One a MoE layer, in row order."""
    experts: Experts
    picker: Picker
    counters: LayerCounters
    ep_rank: int
    spare: SpareSlots
    expert_shards: int = 1
    """Ranks that share each expert (moe_tp_size): each moves its part."""
    reader: ExpertReader | None = None
    """Of the checkpoint, where experts come from there and not from other ranks."""
    canaries: Sequence[torch.Tensor] = ()
    """In debug mode [local slots] int64 expert numbers of each layer, which travel with the tensors."""
    slots: npt.NDArray[np.int64] = attrs.field(init=False)
    """[L, P] host copy of the map in force."""
    clock: Callable[[], float] = time.perf_counter

    def __attrs_post_init__(self) -> None:
        self.slots = self.maps.host.physical_to_logical.numpy().copy()

    @property
    def num_layers(self) -> int:
        return len(self.tensors)

    def placement(self) -> Placement:
        """The placement in force; while layers move, some have switched and some have not."""
        return Placement.from_physical(self.slots.copy(), self.maps.replica_counts.shape[1])

    def check(self, new: Placement) -> None:
        """Raises ``InvalidPlacement`` unless ``new`` can be switched to."""
        num_experts, width = self.maps.logical_to_physical.shape[1:]
        check_fits(new, self.topology, num_layers=self.num_layers, num_experts=num_experts)
        most = int(new.replica_counts.max())
        if most > width:
            raise InvalidPlacement(
                f"an expert has {most} replicas and the maps hold {width}; raise eplb.max_replicas or plan with fewer"
            )

    def changed_layers(self, new: Placement) -> list[int]:
        """Rows of MoE layers that differ from the placement in force."""
        rows = np.flatnonzero((self.slots != new.physical_to_logical).any(axis=1))
        return [int(row) for row in rows]

    def plan_order(self, counts: torch.Tensor, *, passes_to_next: int, rates: Rates) -> PlanOrder:
        """To plan from the placement in force. ``counts``: [segments, L, E] on the host."""
        return PlanOrder(
            counts=Numbers.of(counts.numpy()),
            current=Numbers.of(self.slots),
            topology=self.topology,
            slot_bytes=self.spare.slot_bytes,
            passes_to_next=passes_to_next,
            rates=rates,
        )

    def layer_order(self, row: int, new: Placement, max_step_bytes: int) -> LayerOrder:
        """To find out how a layer moves."""
        budget = MoveBudget.of(
            slot_bytes=self.spare.slot_bytes,
            max_step_bytes=max_step_bytes,
            max_replicas=int(self.maps.logical_to_physical.shape[2]),
            is_on_host=self.maps.physical_to_logical.device.type == "cpu",
        )
        return LayerOrder(
            row=row,
            old=tuple(self.slots[row].tolist()),
            new=tuple(new.physical_to_logical[row].tolist()),
            topology=self.topology,
            budget=budget,
            ep_rank=self.ep_rank,
        )

    def transfer(self, plan: LayerPlan, carrier: SliceCarrier) -> LayerTransfer:
        """Staging of one layer; nothing is sent yet."""
        live = self._moved(plan.moves.layer)
        return LayerTransfer(plan, live, self.spare, carrier, ep_rank=self.ep_rank, reader=self.reader)

    def switch(self, plan: LayerPlan, group: Sequence[int]) -> float:
        """Puts a group of a staged layer's slots into force, between two steps; all ranks after the same one. Seconds of the copies."""
        row, local = plan.moves.layer, self.topology.slots_per_gpu
        own = [slot % local for slot in group if slot // local == self.ep_rank]
        self.counters.flush_layer(row)
        started = self.clock()
        self.spare.copy_to(self._moved(row), {slot: plan.sources[slot] for slot in own})
        copied_s = self.clock() - started
        if own:
            self.experts.refresh(self.tensors[row].layer, sorted(own))
        self.slots[row, list(group)] = plan.experts_of(group)
        placement = Placement.from_physical(self.slots[row : row + 1], self.maps.replica_counts.shape[1])
        overwrite_layer(self.maps, row, placement, row=0)
        self.picker.placement_changed(row)
        return copied_s

    def _moved(self, row: int) -> Mapping[str, torch.Tensor]:
        return moved_tensors(self.tensors[row], self.canaries[row] if self.canaries else None)


def make_canaries(maps: PlacementMaps, ep_rank: int, num_local: int) -> tuple[torch.Tensor, ...]:
    """The number of the expert in each local slot, one tensor a MoE layer."""
    first = ep_rank * num_local
    return tuple(row[first : first + num_local].clone() for row in maps.physical_to_logical)
