"""Spreads the tokens of an expert over all its replicas; for the pickers that do so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from crossdock.types.location import PickerSpec

_TABLE_SIZE = 1 << 16
_LAYER_STRIDE = 7919
"""Layers start at different places of the table, so that they do not pick alike."""


class ReplicaSpread:
    """Row number modulo replicas where ranks hold the same rows, else pseudo-random per (token, choice).

    The random numbers are a table made once from the seed and the rank, read from a position that moves on by what was used: a run
    repeats exactly, and the position lies on the device, so a captured graph moves it too.
    """

    def __init__(self, spec: PickerSpec) -> None:
        self._maps = spec.maps
        self._by_row = spec.replicated_rows
        device = spec.maps.replica_counts.device
        generator = torch.Generator().manual_seed(spec.seed * 1_000_003 + spec.place.rank)
        self._randoms = torch.randint(0, _TABLE_SIZE, (_TABLE_SIZE,), generator=generator).to(device)
        num_layers = spec.maps.replica_counts.shape[0]
        self._positions = (torch.arange(num_layers, device=device) * _LAYER_STRIDE) % _TABLE_SIZE

    def pick(self, layer: int, topk_ids: torch.Tensor) -> torch.Tensor:
        """[n, K] int64 logical ids of one MoE layer row -> [n, K] int64 physical ids."""
        replicas = self._maps.logical_to_physical[layer]
        if replicas.shape[1] == 1:
            return replicas[:, 0][topk_ids]
        numbers = _row_numbers(topk_ids) if self._by_row else self._random_numbers(layer, topk_ids)
        return replicas[topk_ids, numbers % self._maps.replica_counts[layer][topk_ids]]

    def _random_numbers(self, layer: int, topk_ids: torch.Tensor) -> torch.Tensor:
        position = self._positions[layer]
        count = topk_ids.numel()
        numbers = self._randoms[(position + torch.arange(count, device=topk_ids.device)) % _TABLE_SIZE]
        position.add_(count)
        return numbers.view(topk_ids.shape)


def _row_numbers(topk_ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(topk_ids.shape[0], device=topk_ids.device)[:, None]
