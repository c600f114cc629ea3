"""Dispatch over a variable all-to-all: one row a token and destination rank, partial sums back, added in rank order.

The de-duplicated form is DeepEP's normal protocol: a row goes once to each rank that holds at least one of its experts, with its local
expert ids and weights; that rank returns one weighted partial sum. Small steps whose row counts all ranks know take one round instead
of two: every row goes to every rank, so no counts have to be exchanged first. Both forms add the same values in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch
from crossdock.ops.host_lists import int_rows
from crossdock.rows import Rows
from crossdock.types.dispatch import Pending, Received, ReceiveLayout

from crossdock_dispatchers.alltoallv.capabilities import alltoallv_capabilities
from crossdock_dispatchers.alltoallv.wire import WireFormat

if TYPE_CHECKING:
    from crossdock.types.comm import PendingRows
    from crossdock.types.dispatch import DispatcherCapabilities, DispatcherSpec, DispatchStep

    from crossdock_dispatchers.alltoallv.options import AllToAllVOptions


@attrs.frozen(kw_only=True, eq=False)
class _Route:
    """Where the rows of one dispatch went, enough to bring results back."""

    num_rows: int
    send_counts: list[int]
    recv_counts: list[int]
    send_rows: torch.Tensor | None
    """[sum(send_counts)] own row of each sent one, by destination; None when every row went to every rank, in order."""


@attrs.frozen(kw_only=True, eq=False)
class _Travelling:
    """Rows under way in one direction."""

    rows: PendingRows
    route: _Route


class AllToAllV:
    """Variable all-to-all over the expert group, which is all ranks; gloo and NCCL, any number of rows, no capacity."""

    def __init__(self, spec: DispatcherSpec, options: AllToAllVOptions) -> None:
        self._spec = spec
        self._capabilities = alltoallv_capabilities(spec.sizes)
        self._comm = spec.comms.moe_ep
        self._wire = WireFormat(hidden_size=spec.hidden_size, top_k=spec.top_k, dtype=spec.dtype)
        self._one_round_rows = options.one_round_bytes // self._wire.row_bytes

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
        counts = step.source_counts
        if self._comm.size == 1:
            received = Received(
                layout=ReceiveLayout.TOKEN_ROWS,
                rows=hidden_states,
                local_topk_ids=topk_ids,
                row_weights=topk_weights,
                slot=slot,
            )
            return Pending(slot=slot, payload=received)
        if counts is not None and sum(counts) <= self._one_round_rows:
            payload = self._send_everywhere(hidden_states, topk_ids, topk_weights, counts)
        else:
            payload = self._send_where_needed(hidden_states, topk_ids, topk_weights)
        return Pending(slot=slot, payload=payload)

    def dispatch_end(self, pending: Pending) -> Received:
        if isinstance(pending.payload, Received):
            return pending.payload
        travelling: _Travelling = pending.payload
        rows, ids, weights = self._wire.views(travelling.rows.wait())
        return Received(
            layout=ReceiveLayout.TOKEN_ROWS,
            rows=rows,
            local_topk_ids=self._local_ids(ids),
            row_weights=weights,
            slot=pending.slot,
            way_back=travelling.route,
        )

    def combine_begin(self, expert_out: torch.Tensor, received: Received) -> Pending:
        if received.way_back is None:
            return Pending(slot=received.slot, payload=expert_out)
        route: _Route = received.way_back
        partials = expert_out.to(self._spec.dtype)
        rows = self._comm.all_to_all_begin(partials, route.recv_counts, route.send_counts)
        return Pending(slot=received.slot, payload=_Travelling(rows=rows, route=route))

    def combine_end(self, pending: Pending) -> Rows:
        if isinstance(pending.payload, torch.Tensor):
            total = pending.payload
        else:
            travelling: _Travelling = pending.payload
            total = self._sum_in_rank_order(travelling.rows.wait(), travelling.route)
        capabilities = self._capabilities
        combined = total.to(self._spec.dtype)
        return Rows(combined, capabilities.output_rows, capabilities.output_owed, self._spec.comms)

    def _send_everywhere(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, counts: tuple[int, ...]
    ) -> _Travelling:
        num_rows, size = hidden_states.shape[0], self._comm.size
        buffer = self._wire.pack(hidden_states, topk_ids, topk_weights)
        send_counts = [num_rows] * size
        recv_counts = [counts[rank] for rank in self._comm.ranks]
        rows = self._comm.all_to_all_begin(buffer.repeat(size, 1), send_counts, recv_counts)
        route = _Route(num_rows=num_rows, send_counts=send_counts, recv_counts=recv_counts, send_rows=None)
        return _Travelling(rows=rows, route=route)

    def _send_where_needed(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> _Travelling:
        num_rows, size = hidden_states.shape[0], self._comm.size
        # 1. Which ranks hold an expert of which row; column 0 collects "no expert".
        goes_to = torch.zeros((num_rows, size + 1), dtype=torch.bool, device=topk_ids.device)
        goes_to.scatter_(1, topk_ids.div(self._spec.num_local_experts, rounding_mode="floor") + 1, True)
        goes_to = goes_to[:, 1:]
        # 2. Counts first: gloo and NCCL must know how much arrives.
        send = goes_to.sum(dim=0)
        received = self._comm.all_to_all(send.view(size, 1), [1] * size, [1] * size)
        send_counts, recv_counts = int_rows(torch.stack((send, received.view(size))))
        # 3. Rows ordered by destination, then by own row.
        send_rows = goes_to.t().nonzero()[:, 1]
        buffer = self._wire.pack(hidden_states[send_rows], topk_ids[send_rows], topk_weights[send_rows])
        rows = self._comm.all_to_all_begin(buffer, send_counts, recv_counts)
        route = _Route(num_rows=num_rows, send_counts=send_counts, recv_counts=recv_counts, send_rows=send_rows)
        return _Travelling(rows=rows, route=route)

    def _local_ids(self, physical_ids: torch.Tensor) -> torch.Tensor:
        """[R, K] int32 physical ids -> int64 ids of this rank's slots, -1 for experts of other ranks and for no expert."""
        local = physical_ids.to(torch.int64) - self._comm.rank * self._spec.num_local_experts
        return torch.where((local >= 0) & (local < self._spec.num_local_experts), local, -1)

    def _sum_in_rank_order(self, partials: torch.Tensor, route: _Route) -> torch.Tensor:
        """[sum(send_counts), H] partial sums by source rank -> [n, H] float32. Rank by rank, so the order of additions is fixed."""
        total = torch.zeros((route.num_rows, partials.shape[1]), dtype=torch.float32, device=partials.device)
        start = 0
        for count in route.send_counts:
            part = partials[start : start + count].to(torch.float32)
            if route.send_rows is None:
                total += part
            else:
                total.index_add_(0, route.send_rows[start : start + count], part)
            start += count
        return total
