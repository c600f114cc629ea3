"""Dispatch on rows that every rank already holds: a map from physical to local expert ids, and partial sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from crossdock.rows import Rows
from crossdock.types.dispatch import Pending, Received, ReceiveLayout

from crossdock_dispatchers.allgatherv.capabilities import allgatherv_capabilities

if TYPE_CHECKING:
    from crossdock.types.dispatch import DispatcherCapabilities, DispatcherSpec, DispatchStep


class AllGatherV:
    """The boundary gathers before and reduces after; this object moves nothing.

    Works for any moe_ep x moe_tp: ranks of one expert shard but different moe_tp hold shares of the same experts, so their outputs
    are partial sums like those of other expert shards.
    """

    def __init__(self, spec: DispatcherSpec) -> None:
        self._spec = spec
        self._capabilities = allgatherv_capabilities(spec.sizes)
        self._first_expert = spec.place.moe_ep_rank * spec.num_local_experts

    @property
    def capabilities(self) -> DispatcherCapabilities:
        return self._capabilities

    def dispatch_begin(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        step: DispatchStep,
        slot: int,
    ) -> Pending:
        received = Received(
            layout=ReceiveLayout.REPLICATED,
            rows=hidden_states,
            local_topk_ids=self._local_ids(topk_ids),
            row_weights=topk_weights,
            slot=slot,
        )
        return Pending(slot=slot, payload=received)

    def dispatch_end(self, pending: Pending) -> Received:
        received: Received = pending.payload
        return received

    def combine_begin(self, expert_out: torch.Tensor, received: Received) -> Pending:
        return Pending(slot=received.slot, payload=expert_out)

    def combine_end(self, pending: Pending) -> Rows:
        capabilities = self._capabilities
        partial: torch.Tensor = pending.payload.to(self._spec.dtype)
        return Rows(partial, capabilities.output_rows, capabilities.output_owed, self._spec.comms)

    def _local_ids(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """[n, K] physical ids to ids of this rank's slots, -1 for experts of others and for no expert."""
        if self._spec.sizes.moe_ep_size == 1:
            return topk_ids
        local = topk_ids - self._first_expert
        return torch.where((local >= 0) & (local < self._spec.num_local_experts), local, -1)
