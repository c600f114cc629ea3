"""Loads of the ranks over the last passes, and how even they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from crossdock.ops.host_lists import float_list

if TYPE_CHECKING:
    from crossdock.types.comm import GroupComm

_LONGEST_WINDOW = 1000


def balancedness_of(loads: torch.Tensor) -> torch.Tensor:
    """[..., ranks] loads -> [...] float64 mean over max, 1.0 where there is no load."""
    loads = loads.to(torch.float64)
    highest = loads.amax(dim=-1)
    return torch.where(highest > 0, loads.mean(dim=-1) / highest.clamp(min=1e-300), 1.0)


class LoadWindow:
    """[1000, L, ranks] int32 loads of passes, for windows of up to 1000 passes."""

    def __init__(self, num_layers: int, num_physical: int, num_ranks: int, device: torch.device) -> None:
        self._loads = torch.zeros((_LONGEST_WINDOW, num_layers, num_ranks), dtype=torch.int32, device=device)
        self._slots = num_physical // num_ranks
        self._next = 0
        self._fill = 0

    def clear(self) -> None:
        self._loads.zero_()
        self._next = self._fill = 0

    def push(self, counts: torch.Tensor) -> None:
        """[L, P] int32 of one pass."""
        num_layers, num_ranks = self._loads.shape[1:]
        by_rank = counts.reshape(num_layers, num_ranks, self._slots).sum(dim=2, dtype=torch.int32)
        self._loads[self._next].copy_(by_rank)
        self._next = (self._next + 1) % _LONGEST_WINDOW
        self._fill = min(self._fill + 1, _LONGEST_WINDOW)

    def flush_layer(self, layer: int) -> None:
        """Loads of ranks are what they are, whatever the map says next."""

    def balancedness(self, world: GroupComm, windows: tuple[int, ...]) -> dict[int, tuple[float, ...]]:
        """Per window the mean, over its passes with load in a layer, of that layer's balancedness; loads are summed over ranks first."""
        newest_first = self._loads.roll(-self._next, dims=0).flip(0)[: self._fill]
        loads = world.all_reduce(newest_first)
        has_load = loads.sum(dim=2) > 0
        values = torch.where(has_load, balancedness_of(loads), 0.0)
        result: dict[int, tuple[float, ...]] = {}
        for window in windows:
            passes = has_load[:window].sum(dim=0)
            mean = values[:window].sum(dim=0) / passes.clamp(min=1)
            result[window] = tuple(float_list(torch.where(passes > 0, mean, 1.0)))
        return result
