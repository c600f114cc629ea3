"""One rank holds every expert: rows stay where they are, and neither the library nor a GPU is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from crossdock.rows import Rows
from crossdock.types.dispatch import Pending, Received, ReceiveLayout

from crossdock_dispatchers.deepep.capabilities import deepep_capabilities

if TYPE_CHECKING:
    from crossdock.types.dispatch import DispatcherCapabilities, DispatcherSpec, DispatchStep

    from crossdock_dispatchers.deepep.options import DeepEpOptions


class OneRank:
    """Physical ids are local ids, and the experts' weighted sum is the result."""

    def __init__(self, spec: DispatcherSpec, options: DeepEpOptions) -> None:
        self._spec = spec
        self._capabilities = deepep_capabilities(spec.sizes, options, None)

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
            layout=ReceiveLayout.TOKEN_ROWS,
            rows=hidden_states,
            local_topk_ids=topk_ids,
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
        combined: torch.Tensor = pending.payload
        capabilities = self._capabilities
        return Rows(combined.to(self._spec.dtype), capabilities.output_rows, capabilities.output_owed, self._spec.comms)
