"""Picks by a table of this rank: one gather a layer, nothing random in a step."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch
from crossdock.ops.host_lists import int_rows

from crossdock_eplb_algos.expert_location.static.capabilities import STATIC_CAPABILITIES
from crossdock_eplb_algos.expert_location.static.nearest import Cluster, picks_of_layer

if TYPE_CHECKING:
    from crossdock.types.location import PickerCapabilities, PickerSpec


class StaticPicker:
    """A table [L, E] of physical ids, overwritten in place when a placement changes.

    The draw is one stream walked over layers; the state before each layer is kept, so that one layer can be drawn again.
    """

    def __init__(self, spec: PickerSpec, seed: int) -> None:
        self._spec = spec
        topology = spec.topology
        self._cluster = Cluster(
            num_ranks=topology.num_gpus, num_nodes=topology.num_nodes, num_slots=topology.num_physical_experts
        )
        draw = random.Random(seed)
        num_layers = spec.maps.replica_counts.shape[0]
        self._states = [draw.getstate()] * (num_layers + 1)
        self._table = torch.empty_like(spec.maps.replica_counts)
        for layer in range(num_layers):
            self.placement_changed(layer)

    @property
    def capabilities(self) -> PickerCapabilities:
        return STATIC_CAPABILITIES

    def transform_router(
        self, logits: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return logits, bias

    def pick(self, layer: int, topk_ids: torch.Tensor, live_rows: int | torch.Tensor) -> torch.Tensor:
        return self._table[layer][topk_ids]

    def placement_changed(self, layer: int) -> None:
        maps = self._spec.maps
        lists = int_rows(maps.host.logical_to_physical[layer])
        replica_lists = [[slot for slot in replicas if slot >= 0] for replicas in lists]
        draw = random.Random()
        draw.setstate(self._states[layer])
        picks = picks_of_layer(replica_lists, self._cluster, draw)
        self._states[layer + 1] = draw.getstate()
        own = torch.tensor(picks[self._spec.place.moe_ep_rank], dtype=torch.int64)
        self._table[layer].copy_(own.pin_memory() if self._table.is_cuda else own, non_blocking=True)
