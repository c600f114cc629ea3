"""What the pickers that balance each batch have in common: count, exchange, solve, hand out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs
import torch

from crossdock_eplb_algos._shared.kernels.water_fill import WaterFill
from crossdock_eplb_algos._shared.layer_copies import LayerCopies, copies_of_layer
from crossdock_eplb_algos._shared.transport import copy_of_tokens, expert_counts, own_quotas, whole_quotas

if TYPE_CHECKING:
    from crossdock.types.location import PickerSpec


@attrs.frozen(eq=False)
class LayerChoice:
    """One layer under the placement in force."""

    copies: LayerCopies
    fill: WaterFill


class ShareRule(Protocol):
    """Decides how many tokens each copy gets."""

    def shares(self, choice: LayerChoice, counts: torch.Tensor) -> torch.Tensor:
        """[R, E] int64 tokens of each rank and expert -> [M, K] float64 tokens of each copy. Pure: ranks get the same from the same."""
        ...


class BalancedPick:
    """Picks of all layers. Where ranks hold different rows, they tell each other their counts, with zero rows too."""

    def __init__(self, spec: PickerSpec, rule: ShareRule, form: str) -> None:
        self._spec = spec
        self._rule = rule
        self._form = form
        self._num_experts = spec.maps.replica_counts.shape[1]
        num_layers = spec.maps.replica_counts.shape[0]
        self._layers = [self._choice(layer) for layer in range(num_layers)]

    def pick(self, layer: int, topk_ids: torch.Tensor) -> torch.Tensor:
        """[n, K] int64 logical ids (-1 where a row carries no token) -> physical ids. A collective, where ranks hold different rows."""
        choice = self._layers[layer]
        own = expert_counts(topk_ids, self._num_experts)
        if self._spec.replicated_rows:
            return copy_of_tokens(topk_ids, own, self._quotas(choice, own[None]), choice.copies)
        counts = self._spec.comms.moe_ep.all_gather(own.to(torch.int32)[None]).to(torch.int64)
        if not choice.copies.num_rows:
            return copy_of_tokens(topk_ids, own, own.new_zeros((0, 0)), choice.copies)
        quotas = own_quotas(
            self._quotas(choice, counts),
            counts[:, choice.copies.experts],
            choice.copies,
            self._spec.place.moe_ep_rank,
            self._spec.topology.num_nodes,
        )
        return copy_of_tokens(topk_ids, own, quotas, choice.copies)

    def placement_changed(self, layer: int) -> None:
        """The layer's choices are made again from the maps."""
        self._layers[layer] = self._choice(layer)

    def _quotas(self, choice: LayerChoice, counts: torch.Tensor) -> torch.Tensor:
        tokens = counts.sum(0)[choice.copies.experts]
        return whole_quotas(self._rule.shares(choice, counts), tokens)

    def _choice(self, layer: int) -> LayerChoice:
        maps = self._spec.maps
        lists: list[list[int]] = maps.logical_to_physical[layer].tolist()
        replica_lists = [[slot for slot in replicas if slot >= 0] for replicas in lists]
        copies = copies_of_layer(replica_lists, self._spec.topology, maps.replica_counts.device)
        return LayerChoice(copies, WaterFill(copies, form=self._form))
