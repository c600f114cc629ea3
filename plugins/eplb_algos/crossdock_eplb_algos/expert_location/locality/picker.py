"""A mixture of the nearest copies and the evenest split, the one that costs least."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossdock_eplb_algos._shared.balanced_pick import BalancedPick
from crossdock_eplb_algos.expert_location.locality.capabilities import LOCALITY_CAPABILITIES
from crossdock_eplb_algos.expert_location.locality.kernels.least_cost import least_cost
from crossdock_eplb_algos.expert_location.locality.kernels.least_cost_torch import WayPrices

if TYPE_CHECKING:
    import torch
    from crossdock.types.location import PickerCapabilities, PickerSpec

    from crossdock_eplb_algos._shared.balanced_pick import LayerChoice
    from crossdock_eplb_algos.expert_location.locality.options import LocalityOptions


class LeastCost:
    """Largest load of a rank plus the mean price of what a rank sends."""

    def __init__(self, options: LocalityOptions, num_nodes: int) -> None:
        self._prices = WayPrices(link_cost=options.link_cost, node_cost=options.node_cost, num_nodes=num_nodes)

    def shares(self, choice: LayerChoice, counts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        even = choice.solve(tokens)
        if counts.shape[0] == 1:
            # All ranks hold the same rows: nothing travels.
            return even
        return least_cost(even, counts, tokens, choice.table, self._prices)


class LocalityPicker:
    """As ``lp``, with the price of the way in the balance."""

    def __init__(self, spec: PickerSpec, options: LocalityOptions) -> None:
        self._pick = BalancedPick(spec, LeastCost(options, spec.topology.num_nodes), options.solver)

    @property
    def capabilities(self) -> PickerCapabilities:
        return LOCALITY_CAPABILITIES

    def transform_router(
        self, logits: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return logits, bias

    def pick(self, layer: int, topk_ids: torch.Tensor, live_rows: int | torch.Tensor) -> torch.Tensor:
        return self._pick.pick(layer, topk_ids)

    def placement_changed(self, layer: int) -> None:
        self._pick.placement_changed(layer)
