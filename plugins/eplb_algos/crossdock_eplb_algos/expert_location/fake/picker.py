"""Random routing for measurements: answers are meaningless, loads are even."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from crossdock_eplb_algos._shared.replica_spread import ReplicaSpread
from crossdock_eplb_algos.expert_location.fake.capabilities import FAKE_CAPABILITIES

if TYPE_CHECKING:
    from crossdock.types.location import PickerCapabilities, PickerSpec

_LOWEST_SCORE, _HIGHEST_SCORE = 5.0, 10.0


class FakePicker:
    """Router logits overwritten with uniform(5, 10), correction bias zero, then replicas spread as ``dynamic`` does."""

    def __init__(self, spec: PickerSpec) -> None:
        self._spread = ReplicaSpread(spec)
        device = spec.maps.replica_counts.device
        own = 0 if spec.replicated_rows else spec.place.rank + 1
        self._generator = torch.Generator(device=device).manual_seed(spec.seed * 1_000_003 + own)

    @property
    def capabilities(self) -> PickerCapabilities:
        return FAKE_CAPABILITIES

    def transform_router(
        self, logits: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        scores = torch.empty_like(logits).uniform_(_LOWEST_SCORE, _HIGHEST_SCORE, generator=self._generator)
        return scores, None if bias is None else torch.zeros_like(bias)

    def pick(self, layer: int, topk_ids: torch.Tensor, live_rows: int | torch.Tensor) -> torch.Tensor:
        return self._spread.pick(layer, topk_ids)

    def placement_changed(self, layer: int) -> None:
        """Picks read the maps themselves, which were overwritten in place."""
