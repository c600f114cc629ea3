"""What the pickers that balance each batch have in common: count, exchange, solve, hand out.

Shapes and addresses never change and no step looks at data on the host, so that a CUDA graph can hold a pick.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import attrs
import torch

from crossdock_eplb_algos._shared.copy_table import CopyTable, copy_table
from crossdock_eplb_algos._shared.kernels.copy_ends import own_ends, whole_ends
from crossdock_eplb_algos._shared.kernels.copy_picks import copy_picks, expert_counts
from crossdock_eplb_algos._shared.kernels.even_shares import even_shares
from crossdock_eplb_algos._shared.kernels.water_fill import WaterFill, shares_of_table
from crossdock_eplb_algos._shared.layer_copies import LayerCopies, layer_copies

if TYPE_CHECKING:
    from collections.abc import Callable

    from crossdock.types.location import PickerSpec


@attrs.define(eq=False)
class LayerChoice:
    """One layer under the placement in force."""

    table: CopyTable
    solve: Callable[[torch.Tensor], torch.Tensor]
    """[E] int64 tokens of each expert, on all ranks together -> [M, R] float32 tokens of each copy, the fullest rank as empty as can be."""


class ShareRule(Protocol):
    """Decides how many tokens each copy gets."""

    def shares(self, choice: LayerChoice, counts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[R, E] int64 tokens of each rank and expert, and [E] their sums -> [M, R] float32 tokens of each copy. Pure: ranks get the
        same from the same."""
        ...


class BalancedPick:
    """Picks of all layers. Where ranks hold different rows, they tell each other their counts, with zero rows too."""

    def __init__(self, spec: PickerSpec, rule: ShareRule, form: str) -> None:
        """``form``: of the CPU's solver, ``auto`` or ``torch``."""
        self._spec = spec
        self._rule = rule
        self._form = form
        num_layers, self._num_experts = spec.maps.replica_counts.shape
        device = spec.maps.replica_counts.device
        self._layers = [self._choice(self._table(layer).to(device)) for layer in range(num_layers)]

    def pick(self, layer: int, topk_ids: torch.Tensor) -> torch.Tensor:
        """[n, K] int64 logical ids (-1 where a row carries no token) -> physical ids. A collective, where ranks hold different rows."""
        choice = self._layers[layer]
        own = expert_counts(topk_ids, self._num_experts)
        if not choice.table.num_rows:
            # Without redundant experts, in any placement: nobody has a choice, so nothing is told.
            return copy_picks(topk_ids, own, choice.table.slots, choice.table)
        if self._spec.replicated_rows:
            ends = self._ends(choice, own[None])
        else:
            counts = self._spec.comms.moe_ep.all_gather(own[None])
            ends = own_ends(
                self._ends(choice, counts),
                counts,
                choice.table,
                self._spec.place.moe_ep_rank,
                self._spec.topology.num_nodes,
            )
        return copy_picks(topk_ids, own, ends, choice.table)

    def placement_changed(self, layer: int) -> None:
        """The layer's choices are made again from the maps, in the same tensors."""
        choice = self._layers[layer]
        choice.table.overwrite(self._table(layer))
        choice.solve = self._choice(choice.table).solve

    def _ends(self, choice: LayerChoice, counts: torch.Tensor) -> torch.Tensor:
        tokens = counts.sum(0)
        return whole_ends(self._rule.shares(choice, counts, tokens), tokens, choice.table)

    def _table(self, layer: int) -> CopyTable:
        maps = self._spec.maps
        return copy_table(maps.host.logical_to_physical[layer].numpy(), self._spec.topology)

    def _choice(self, table: CopyTable) -> LayerChoice:
        if table.slots.device.type != "cpu":
            return LayerChoice(table, partial(even_shares, table=table))
        copies = layer_copies(table)
        return LayerChoice(table, partial(_swept, WaterFill(copies, form=self._form), copies, table))


def _swept(fill: WaterFill, copies: LayerCopies, table: CopyTable, tokens: torch.Tensor) -> torch.Tensor:
    return shares_of_table(copies, fill.solve(tokens), table)
