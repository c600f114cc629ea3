"""Expert counts since the last decision, in a few segments of time: what a planner is given. Costs two additions a pass."""

from __future__ import annotations

import math

import attrs
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

    def totals(self, world: GroupComm) -> LoadTotals:
        """Counts of all ranks; waits for the device. A collective; every rank calls it after the same pass."""
        return self.start_totals(world).take()

    def start_totals(self, world: GroupComm) -> PendingTotals:
        """The same without a wait: counts until now, on their way to the host."""
        owners = self._maps.physical_to_logical.expand_as(self._physical)
        logical = self._logical.scatter_add(2, owners, self._physical)
        both = world.all_reduce(torch.cat((logical.flatten(), self._by_rank.flatten())))
        used = max(1, min(-(-self.num_passes // self._passes_a_segment), NUM_SEGMENTS))
        arrived = None
        if both.is_cuda:
            both = torch.empty(both.shape, dtype=both.dtype, pin_memory=True).copy_(both, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        return PendingTotals(
            both=both, shape=tuple(logical.shape), by_rank_shape=tuple(self._by_rank.shape), used=used, arrived=arrived
        )


@attrs.frozen(kw_only=True, eq=False)
class LoadTotals:
    """Counts of all ranks on the host."""

    counts: torch.Tensor
    """[segments, L, E] float64, oldest first, without segments that no pass fell into (one of zeros when none was recorded)."""
    by_rank: torch.Tensor
    """[L, ranks] float64, what each rank computed."""


@attrs.frozen(kw_only=True, eq=False)
class PendingTotals:
    """Totals on their way."""

    both: torch.Tensor
    """On the host: counts and loads of ranks, end to end."""
    shape: tuple[int, ...]
    by_rank_shape: tuple[int, ...]
    used: int
    """Segments with passes."""
    arrived: torch.cuda.Event | None
    """None: there already."""

    @property
    def is_done(self) -> bool:
        return self.arrived is None or self.arrived.query()

    def take(self) -> LoadTotals:
        """Waits where it is not done."""
        if self.arrived is not None:
            self.arrived.synchronize()
        counts, by_rank = self.both.to(torch.float64).split((math.prod(self.shape), math.prod(self.by_rank_shape)))
        return LoadTotals(counts=counts.view(self.shape)[: self.used], by_rank=by_rank.view(self.by_rank_shape))
