"""A mixture of the nearest copies and the evenest split, the one that costs least."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from crossdock_eplb_algos._shared.balanced_pick import BalancedPick
from crossdock_eplb_algos._shared.copy_table import loads_without_choice, tokens_of_rows
from crossdock_eplb_algos.expert_location.locality.capabilities import LOCALITY_CAPABILITIES
from crossdock_eplb_algos.expert_location.locality.near import nearest_tokens

if TYPE_CHECKING:
    from crossdock.types.location import PickerCapabilities, PickerSpec

    from crossdock_eplb_algos._shared.balanced_pick import LayerChoice
    from crossdock_eplb_algos.expert_location.locality.options import LocalityOptions

_MIXTURES = 9
"""Parts of the even split that are tried, from 0 to 1 in equal steps."""


class LeastCost:
    """Largest load of a rank plus the mean price of what a rank sends.

    Between the nearest copies and the evenest split both are convex in the part of the latter, so a coarse search finds the best.
    """

    def __init__(self, options: LocalityOptions, num_nodes: int) -> None:
        self._link_cost = options.link_cost
        self._node_cost = options.node_cost
        self._num_nodes = num_nodes

    def shares(self, choice: LayerChoice, counts: torch.Tensor) -> torch.Tensor:
        table, tokens = choice.table, counts.sum(0)
        even = choice.solve(tokens)
        if counts.shape[0] == 1 or not table.num_rows:
            return even
        held = tokens_of_rows(table, counts).t().to(torch.float32)
        near = nearest_tokens(held, table.slots >= 0, self._num_nodes)
        part = torch.linspace(0.0, 1.0, _MIXTURES, device=even.device)[:, None, None]
        mixtures = near + part * (even - near)
        loads = loads_without_choice(table, tokens) + mixtures.sum(1)
        best = (loads.amax(1) + self._way_cost(held, mixtures)).argmin(0, keepdim=True)
        return mixtures.index_select(0, best)[0]

    def _way_cost(self, held: torch.Tensor, mixtures: torch.Tensor) -> torch.Tensor:
        """[mixtures] mean over ranks of the price of what leaves it, when as much as possible stays."""
        rows, num_ranks = held.shape
        stays_on_rank = torch.minimum(mixtures, held).sum((1, 2))
        by_node = (len(mixtures), rows, self._num_nodes, -1)
        stays_on_node = torch.minimum(mixtures.view(by_node).sum(3), held.reshape(by_node[1:]).sum(2)).sum((1, 2))
        leaves_rank, leaves_node = stays_on_node - stays_on_rank, held.sum() - stays_on_node
        return (self._link_cost * leaves_rank + self._node_cost * leaves_node) / num_ranks


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
