"""The split with the smallest largest load, batch by batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossdock_eplb_algos._shared.balanced_pick import BalancedPick
from crossdock_eplb_algos.expert_location.lp.capabilities import LP_CAPABILITIES

if TYPE_CHECKING:
    import torch
    from crossdock.types.location import PickerCapabilities, PickerSpec

    from crossdock_eplb_algos._shared.balanced_pick import LayerChoice


class LeastMaximum:
    """The solution of the linear program."""

    def shares(self, choice: LayerChoice, counts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return choice.solve(tokens)


class LpPicker:
    """Ranks exchange how many tokens they have for each expert, and each solves the same small problem."""

    def __init__(self, spec: PickerSpec, solver: str) -> None:
        self._pick = BalancedPick(spec, LeastMaximum(), solver)

    @property
    def capabilities(self) -> PickerCapabilities:
        return LP_CAPABILITIES

    def transform_router(
        self, logits: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return logits, bias

    def pick(self, layer: int, topk_ids: torch.Tensor, live_rows: int | torch.Tensor) -> torch.Tensor:
        return self._pick.pick(layer, topk_ids)

    def placement_changed(self, layer: int) -> None:
        self._pick.placement_changed(layer)
