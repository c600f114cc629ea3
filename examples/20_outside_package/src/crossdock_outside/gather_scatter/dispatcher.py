"""Own rows in, all rows to the experts, own rows out: an all-gather of rows and a reduce-scatter of sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from crossdock.rows import Rows
from crossdock.types.dispatch import Pending, Received, ReceiveLayout

from crossdock_outside.gather_scatter.capabilities import gather_scatter_capabilities

if TYPE_CHECKING:
    from crossdock.types.dispatch import DispatcherCapabilities, DispatcherSpec, DispatchStep


class GatherScatter:
    """Every rank sees every row, so nothing can overflow; the price is that every rank receives all of them."""

    def __init__(self, spec: DispatcherSpec) -> None:
        self._spec = spec
        self._group = spec.comms.moe_ep
        self._first_expert = spec.place.moe_ep_rank * spec.num_local_experts

    @property
    def capabilities(self) -> DispatcherCapabilities:
        return gather_scatter_capabilities(self._spec.sizes)

    def dispatch_begin(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        step: DispatchStep,
        slot: int,
    ) -> Pending:
        """Gathers rows, ids and weights; a rank without rows joins with none."""
        counts = self._counts(hidden_states.shape[0], step)
        rows = self._group.all_gatherv(hidden_states, counts)
        ids = self._group.all_gatherv(topk_ids, counts)
        weights = self._group.all_gatherv(topk_weights, counts)
        received = Received(
            layout=ReceiveLayout.REPLICATED,
            rows=rows,
            local_topk_ids=self._local_ids(ids),
            row_weights=weights,
            slot=slot,
            way_back=tuple(counts),
        )
        return Pending(slot=slot, payload=received)

    def dispatch_end(self, pending: Pending) -> Received:
        received: Received = pending.payload
        return received

    def combine_begin(self, expert_out: torch.Tensor, received: Received) -> Pending:
        """Sums every row over the ranks and returns each rank its own; in fp32, so that the order of ranks costs nothing."""
        own = self._group.reduce_scatterv(expert_out.float(), received.way_back)
        return Pending(slot=received.slot, payload=own.to(self._spec.dtype))

    def combine_end(self, pending: Pending) -> Rows:
        declared = self.capabilities
        return Rows(pending.payload, declared.output_rows, declared.output_owed, self._spec.comms)

    def _counts(self, num_rows: int, step: DispatchStep) -> Sequence[int]:
        """Rows of each rank: known to the host, or asked for."""
        if step.source_counts is not None:
            return step.source_counts
        own = torch.tensor([num_rows], dtype=torch.int64, device=self._spec.device)
        counts: list[int] = self._group.all_gather(own).tolist()
        return counts

    def _local_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """[R, K] physical ids to ids of this rank's slots, -1 for experts of others and for no expert."""
        local = ids - self._first_expert
        is_here = (ids >= 0) & (local >= 0) & (local < self._spec.num_local_experts)
        return torch.where(is_here, local, -1)
