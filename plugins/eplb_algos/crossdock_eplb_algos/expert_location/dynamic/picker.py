"""Spreads the tokens of an expert over all its replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from crossdock_eplb_algos.expert_location.dynamic.capabilities import DYNAMIC_CAPABILITIES

if TYPE_CHECKING:
    from crossdock.types.location import PickerCapabilities, PickerSpec

_TABLE_SIZE = 1 << 16


class DynamicPicker:
    """Row number modulo replicas where ranks hold the same rows, else pseudo-random per (token, choice).

    The random numbers are a table made once from the seed and the rank and read from a position that moves on by what was used: no
    generator state, so a run repeats exactly, and the position lies on the device, so a captured graph moves it too.
    """

    def __init__(self, spec: PickerSpec) -> None:
        self._spec = spec
        maps = spec.maps
        device = maps.replica_counts.device
        generator = torch.Generator().manual_seed(spec.seed * 1_000_003 + spec.place.rank)
        self._randoms = torch.randint(0, _TABLE_SIZE, (_TABLE_SIZE,), generator=generator).to(device)
        num_layers = maps.replica_counts.shape[0]
        self._positions = (torch.arange(num_layers, device=device) * 7919) % _TABLE_SIZE

    @property
    def capabilities(self) -> PickerCapabilities:
        return DYNAMIC_CAPABILITIES

    def transform_router(
        self, logits: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return logits, bias

    def pick(self, layer: int, topk_ids: torch.Tensor, live_rows: int | torch.Tensor) -> torch.Tensor:
        maps = self._spec.maps
        replicas = maps.logical_to_physical[layer]
        if replicas.shape[1] == 1:
            return replicas[:, 0][topk_ids]
        numbers = self._row_numbers(topk_ids) if self._spec.replicated_rows else self._random_numbers(layer, topk_ids)
        return replicas[topk_ids, numbers % maps.replica_counts[layer][topk_ids]]

    def placement_changed(self, layer: int) -> None:
        """Picks read the maps themselves, which were overwritten in place."""

    def _row_numbers(self, topk_ids: torch.Tensor) -> torch.Tensor:
        return torch.arange(topk_ids.shape[0], device=topk_ids.device)[:, None]

    def _random_numbers(self, layer: int, topk_ids: torch.Tensor) -> torch.Tensor:
        position = self._positions[layer]
        count = topk_ids.numel()
        numbers = self._randoms[(position + torch.arange(count, device=topk_ids.device)) % _TABLE_SIZE]
        position.add_(count)
        return numbers.view(topk_ids.shape)
