"""Tokens of an expert spread over all its replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossdock_eplb_algos._shared.replica_spread import ReplicaSpread
from crossdock_eplb_algos.expert_location.dynamic.capabilities import DYNAMIC_CAPABILITIES

if TYPE_CHECKING:
    import torch
    from crossdock.types.location import PickerCapabilities, PickerSpec


class DynamicPicker:
    """Replicas take turns, by row where ranks hold the same rows, else by pseudo-random numbers."""

    def __init__(self, spec: PickerSpec) -> None:
        self._spread = ReplicaSpread(spec)

    @property
    def capabilities(self) -> PickerCapabilities:
        return DYNAMIC_CAPABILITIES

    def transform_router(
        self, logits: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return logits, bias

    def pick(self, layer: int, topk_ids: torch.Tensor, live_rows: int | torch.Tensor) -> torch.Tensor:
        return self._spread.pick(layer, topk_ids)

    def placement_changed(self, layer: int) -> None:
        """Picks read the maps themselves, which were overwritten in place."""
