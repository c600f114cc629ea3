"""Counts of the last passes by physical expert, turned logical by the placement of their time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from crossdock.types.location import PlacementMaps


class CountRing:
    """[buffer, L, P] int32 on the device, and its fill level: unused rows are never mistaken for idle passes.

    Layers that were flushed keep [buffer, L, E] logical counts beside it; that tensor exists from the first flush on.
    """

    def __init__(self, buffer_steps: int, maps: PlacementMaps) -> None:
        num_layers, num_physical = maps.physical_to_logical.shape
        self._maps = maps
        self._physical = torch.zeros(
            (buffer_steps, num_layers, num_physical), dtype=torch.int32, device=maps.physical_to_logical.device
        )
        self._logical: torch.Tensor | None = None
        self._next = 0
        self.fill = 0

    def slots_per_rank(self, moe_ep_size: int) -> int:
        """Physical experts of one rank."""
        return self._physical.shape[2] // moe_ep_size

    def clear(self) -> None:
        self._physical.zero_()
        self._logical = None
        self._next = self.fill = 0

    def push(self, counts: torch.Tensor) -> None:
        """[L, P] int32 of one pass; takes the place of the oldest one when the ring is full."""
        self._physical[self._next].copy_(counts)
        if self._logical is not None:
            self._logical[self._next].zero_()
        self._next = (self._next + 1) % self._physical.shape[0]
        self.fill = min(self.fill + 1, self._physical.shape[0])

    def flush_layer(self, layer: int) -> None:
        """Moves a layer's physical counts of all passes into the logical ones."""
        if not self.fill:
            return
        if self._logical is None:
            steps, num_layers = self._physical.shape[:2]
            num_logical = self._maps.replica_counts.shape[1]
            self._logical = self._physical.new_zeros((steps, num_layers, num_logical))
        owners = self._maps.physical_to_logical[layer]
        self._logical[:, layer].index_add_(1, owners, self._physical[:, layer])
        self._physical[:, layer].zero_()

    def logical_counts(self) -> torch.Tensor:
        """[fill, L, E] int32 of this rank, oldest pass first."""
        steps, num_layers, num_physical = self._physical.shape
        num_logical = self._maps.replica_counts.shape[1]
        owners = self._maps.physical_to_logical.expand(steps, num_layers, num_physical)
        logical = self._physical.new_zeros((steps, num_layers, num_logical))
        logical.scatter_add_(2, owners, self._physical)
        if self._logical is not None:
            logical += self._logical
        oldest = self._next if self.fill == steps else 0
        return logical.roll(-oldest, dims=0)[: self.fill]
