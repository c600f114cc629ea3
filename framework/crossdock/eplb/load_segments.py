"""Expert counts since the last decision, in a few segments of time: what a planner is given. Costs two additions a pass."""

from __future__ import annotations

import torch

from crossdock.types.comm import GroupComm
from crossdock.types.location import PlacementMaps

NUM_SEGMENTS = 4
"""Steps that a planner sees for its forecast."""


class LoadSegments:
    """A ``CountSink`` of the recorder: [segments, L, P] physical counts of this rank, turned logical by the map of their time."""

    def __init__(self, maps: PlacementMaps, num_ranks: int, interval: int) -> None:
        """``interval``: passes between two decisions; a segment is a part of it, the last one takes what comes after."""
        num_layers, num_physical = maps.physical_to_logical.shape
        num_logical = maps.replica_counts.shape[1]
        device = maps.physical_to_logical.device
        self._maps = maps
        self._passes_a_segment = -(-interval // NUM_SEGMENTS)
        self._physical = torch.zeros((NUM_SEGMENTS, num_layers, num_physical), dtype=torch.int64, device=device)
        self._logical = torch.zeros((NUM_SEGMENTS, num_layers, num_logical), dtype=torch.int64, device=device)
        self._by_rank = torch.zeros((num_layers, num_ranks), dtype=torch.int64, device=device)
        self.num_passes = 0

    def push(self, counts: torch.Tensor) -> None:
        """[L, P] int32 of one pass."""
        segment = min(self.num_passes // self._passes_a_segment, NUM_SEGMENTS - 1)
        self._physical[segment] += counts
        self._by_rank += counts.view(*self._by_rank.shape, -1).sum(2)
        self.num_passes += 1

    def flush_layer(self, layer: int) -> None:
        """Before the layer's map is overwritten: its counts become logical ones."""
        self._logical[:, layer].index_add_(1, self._maps.physical_to_logical[layer], self._physical[:, layer])
        self._physical[:, layer].zero_()

    def clear(self) -> None:
        for tensor in (self._physical, self._logical, self._by_rank):
            tensor.zero_()
        self.num_passes = 0

    def totals(self, world: GroupComm) -> tuple[torch.Tensor, torch.Tensor]:
        """Counts of all ranks. A collective; every rank calls it after the same pass.

        Returns:
            [segments, L, E] float64 on the host, oldest first, without segments that no pass fell into (one of zeros when none
            was recorded); and [L, ranks] float64, what each rank computed.
        """
        owners = self._maps.physical_to_logical.expand_as(self._physical)
        logical = self._logical.scatter_add(2, owners, self._physical)
        sizes = (logical.numel(), self._by_rank.numel())
        both = world.all_reduce(torch.cat((logical.flatten(), self._by_rank.flatten()))).cpu().to(torch.float64)
        counts, by_rank = both.split(sizes)
        used = max(1, min(-(-self.num_passes // self._passes_a_segment), NUM_SEGMENTS))
        return counts.view(logical.shape)[:used], by_rank.view(self._by_rank.shape)
