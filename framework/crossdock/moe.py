"""The routed part of a MoE layer as declared ops: route, dispatch, experts, combine (DESIGN sections 7, 8 and 10)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs

from crossdock.errors import RowsMisuse
from crossdock.groups import drop_unit_axes
from crossdock.types.layout import TokenAxis

if TYPE_CHECKING:
    import torch

    from crossdock.rows import Rows
    from crossdock.types.batch import ForwardBatch
    from crossdock.types.dispatch import Pending, Received
    from crossdock.types.layout import Layout
    from crossdock.types.model import ForwardContext, MoeParts
    from crossdock.types.parallel import ParallelSizes, RankPlace


class Router(Protocol):
    """A model's routing rule. It owns the routed scaling factor: weights leave it scaled, and nobody else multiplies by it."""

    @property
    def bias(self) -> torch.Tensor | None:
        """Correction bias [E] float32, for the choice only; None where the model has none."""
        ...

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, E] float32."""
        ...

    def select(self, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, E] float32 -> top-k ids [n, K] int64 logical, weights [n, K] float32 with the routed scaling factor."""
        ...


@runtime_checkable
class SlotRouter(Protocol):
    """A router that can name slots and mask padding in the same pass, where an expert has one slot only."""

    def select_slots(
        self,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        slots: torch.Tensor,
        padded_rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``Router.select``, with ``slots`` [E] int64 for ids and -1 in rows where ``padded_rows`` [n, 1] bool is set (None: nowhere)."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class RoutedTokens:
    """Where each row goes. Rows that carry no token have id -1 everywhere."""

    topk_ids: torch.Tensor
    """[n, K] int64 physical."""
    topk_weights: torch.Tensor
    """[n, K] float32, routed scaling included."""


class MoeBlock:
    """One layer's routed experts on one rank; its methods are the op functions of the layer.

    ``layer`` is the model's layer number, under which the experts hold their tensors; ``layer_row`` the row in placements and counters.
    """

    def __init__(
        self, *, layer: int, layer_row: int, router: Router, parts: MoeParts, sizes: ParallelSizes, place: RankPlace
    ) -> None:
        self._layer = layer
        self._layer_row = layer_row
        self._router = router
        self._parts = parts
        self._sizes = sizes
        self._place = place
        self._input_rows = parts.dispatcher.capabilities.input_rows
        # Room for one replica an expert: there is nothing to pick, and the map itself, overwritten in place, is the answer.
        replicas, picker = parts.maps.logical_to_physical[layer_row], parts.picker.capabilities
        is_plain = replicas.shape[1] == 1 and not picker.collective_per_layer and not picker.needs_load
        self._slots = replicas[:, 0]
        self._slot_router = router if is_plain and isinstance(router, SlotRouter) else None

    def route(self, ctx: ForwardContext, hidden: Rows) -> RoutedTokens:
        """Router, replica pick, padding to -1, counters. Runs with zero rows too: a picker may hold a collective."""
        if hidden.layout != self._input_rows:
            raise RowsMisuse(
                f"layer {self._layer}: the MoE got rows in layout {_names(hidden.layout)}, its dispatcher takes "
                f"{_names(self._input_rows)}; let the boundary move them"
            )
        picker = self._parts.picker
        logits, bias = picker.transform_router(self._router.logits(hidden.value), self._router.bias)
        if self._slot_router is not None:
            ids, weights = self._slot_router.select_slots(logits, bias, self._slots, ctx.dispatch_step.padded_rows)
            if ctx.dispatch_step.padded_rows is None:
                ids = self._without_padding(ctx, ids)
        else:
            ids, weights = self._router.select(logits, bias)
            ids = self._without_padding(ctx, ids)
            ids = self._without_padding(ctx, picker.pick(self._layer_row, ids, ids.shape[0]))
        self._parts.recorder.record(self._layer_row, ids)
        return RoutedTokens(topk_ids=ids, topk_weights=weights)

    def _without_padding(self, ctx: ForwardContext, ids: torch.Tensor) -> torch.Tensor:
        """``ids`` with -1 in rows that carry no token; a captured step reads them from the device."""
        if ctx.dispatch_step.padded_rows is not None:
            return ids.masked_fill_(ctx.dispatch_step.padded_rows, -1)
        for start, stop in padded_rows(self._input_rows, ctx.batch, self._sizes, self._place):
            ids[start:stop] = -1
        return ids

    def dispatch_begin(self, ctx: ForwardContext, hidden: Rows, routed: RoutedTokens) -> Pending:
        return self._parts.dispatcher.dispatch_begin(
            hidden.value, routed.topk_ids, routed.topk_weights, ctx.dispatch_step, ctx.slot
        )

    def dispatch_end(self, ctx: ForwardContext, pending: Pending) -> Received:
        received = self._parts.dispatcher.dispatch_end(pending)
        self._parts.recorder.record_received(self._layer_row, received)
        return received

    def experts(self, ctx: ForwardContext, received: Received) -> tuple[torch.Tensor, Received]:
        """Expert outputs, and ``received`` again, which combine needs for the way back."""
        return self._parts.experts.run(self._layer, received, ctx.sm_budget), received

    def combine_begin(self, ctx: ForwardContext, expert_out: torch.Tensor, received: Received) -> Pending:
        return self._parts.dispatcher.combine_begin(expert_out, received)

    def combine_end(self, ctx: ForwardContext, pending: Pending) -> Rows:
        return self._parts.dispatcher.combine_end(pending)


def padded_rows(
    layout: Layout, batch: ForwardBatch, sizes: ParallelSizes, place: RankPlace
) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of this rank's rows in ``layout`` that carry no token; empty when all do. Host integers only."""
    live, padded = batch.step.live_tokens, batch.step.padded_tokens
    if live == padded:
        return ()
    layout = drop_unit_axes(layout, sizes)
    if TokenAxis.ATTN_DP in layout:
        live, padded = (live[batch.attn_dp_rank],), (padded[batch.attn_dp_rank],)
    start = 0
    ranges: list[tuple[int, int]] = []
    for live_count, padded_count in zip(live, padded, strict=True):
        ranges.append((start + live_count, start + padded_count))
        start += padded_count
    if TokenAxis.ATTN_TP in layout:
        share = start // sizes.attn_tp_size
        first = share * place.attn_tp_rank
        ranges = [(max(low - first, 0), min(high - first, share)) for low, high in ranges]
    return tuple((low, high) for low, high in ranges if low < high)


def _names(layout: Layout) -> str:
    return "{" + ", ".join(sorted(axis.value for axis in layout)) + "}"
