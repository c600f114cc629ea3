"""The boundary between two blocks: settles owed sums, updates the residual, norms, and moves rows to the next block's layout.

All gathers, cuts and sums outside dispatchers happen here (DESIGN section 6); models state layouts only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol, cast

import attrs
import torch

from crossdock.boundary_entry import BoundaryPlan, Gather, Settle, layout_names
from crossdock.boundary_moves import SMALL_SUMS, RowMoves, SmallSums
from crossdock.errors import RowsMisuse, SelectionRefused
from crossdock.rows import Rows, complete_rows
from crossdock.types.batch import ForwardBatch
from crossdock.types.comm import Comms
from crossdock.types.layout import Layout, TokenAxis

Update = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(residual, finished block output) -> new residual, row by row."""
Norm = Callable[[torch.Tensor], torch.Tensor]


class AddNorm(Protocol):
    """A norm that can be taken together with the addition before it; known by ``after_add``, which is quicker to ask than the protocol."""

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor: ...

    def after_add(self, residual: torch.Tensor, update: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(residual + update, its norm)."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class Stream:
    """What flows between blocks: the residual, and the last block's output that is not yet added to it."""

    residual: Rows | None = None
    """None until the first boundary."""
    pending: Rows | None = None

    def followed_by(self, output: Rows) -> Stream:
        """The stream after a block gave ``output``; its owed sums are left to the next boundary.

        Raises:
            RowsMisuse: the output of the block before was never entered.
        """
        if self.pending is not None:
            raise RowsMisuse("a block's output was dropped: enter a boundary between two blocks")
        return Stream(residual=self.residual, pending=output)


@attrs.frozen(eq=False)
class Boundary:
    """The entry of one block on one rank. Collective: every rank enters, with zero rows too."""

    plan: BoundaryPlan
    comms: Comms
    small_sums: SmallSums = SMALL_SUMS

    def __attrs_post_init__(self) -> None:
        layouts = (self.plan.producer, self.plan.input, self.plan.work)
        if any(TokenAxis.ATTN_CP in layout for layout in layouts) or self.plan.gather is Gather.CP:
            raise SelectionRefused(
                ["attn_cp_refused"], [f"block {self.plan.name!r}: attention CP is not run yet; use attn_cp_size 1"]
            )

    def enter(self, stream: Stream, update: Update | None, norm: Norm, batch: ForwardBatch) -> tuple[Rows, Stream]:
        """The block's input, finished and in its layout, and the stream with the new residual.

        Args:
            stream: as the last block left it; its ``pending`` is spent.
            update: None for a plain add; otherwise needs a plan with ``is_gated_update``.
            norm: applied to rows [n, H], row by row; n may be 0.
            batch: gives the step's counts and the replica.

        Raises:
            RowsMisuse: the stream does not match the plan, or rows do not match the step's counts.
        """
        plan = self.plan
        moves = RowMoves.of(batch.step, self.comms, batch.attn_dp_rank, self.small_sums)
        if (update is not None) != plan.is_gated_update:
            raise RowsMisuse(
                f"block {plan.name!r}: planned with is_gated_update={plan.is_gated_update}, entered otherwise"
            )
        pending, residual = self._taken(stream, moves)
        if plan.joins_residual and residual is not None:
            pending = self._joined(pending, residual, moves)
            residual = None
        settled = self._settle(pending, moves)
        if residual is not None:
            if plan.residual_before != plan.work and plan.work != plan.residual_after:
                raise RowsMisuse(f"block {plan.name!r}: the residual cannot be added on full rows")
            own = residual if plan.residual_before == plan.work else moves.cut_slice(residual)
            if update is None and hasattr(norm, "after_add"):
                settled, normed = cast(AddNorm, norm).after_add(own, settled)
            else:
                settled = own + settled if update is None else update(own, settled)
                normed = norm(settled)
        else:
            normed = norm(settled)
        normed = self._gather(normed, moves)
        after = settled if plan.work == plan.residual_after else moves.cut_replica(settled)
        return (
            complete_rows(normed, plan.input, self.comms),
            Stream(residual=complete_rows(after, plan.residual_after, self.comms)),
        )

    def _taken(self, stream: Stream, moves: RowMoves) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tensors of the stream after a check against plan and counts."""
        plan = self.plan
        if stream.pending is None:
            raise RowsMisuse(f"block {plan.name!r} is entered before the block before it gave its output")
        pending = stream.pending
        if pending.layout != plan.producer or pending.owed != plan.owed:
            raise RowsMisuse(
                f"block {plan.name!r} was planned for {layout_names(plan.producer)} rows owing "
                f"{sorted(axis.value for axis in plan.owed)}, got {layout_names(pending.layout)} rows owing "
                f"{sorted(axis.value for axis in pending.owed)}"
            )
        moves.check(f"input of block {plan.name!r}", pending.num_rows, self._rows_of(plan.producer, moves))
        if plan.completes_first:
            pending = pending.complete(plan.completes_first)
        if stream.residual is None or plan.residual_before is None:
            if stream.residual is not None or plan.residual_before is not None:
                raise RowsMisuse(f"block {plan.name!r}: the residual begins at another block than planned")
            return pending.take(), None
        residual = stream.residual.value
        moves.check(f"residual of block {plan.name!r}", residual.shape[0], self._rows_of(plan.residual_before, moves))
        return pending.take(), residual

    def _rows_of(self, layout: Layout, moves: RowMoves) -> int:
        has_slices, has_replicas = _splits(layout)
        if has_slices:
            return moves.slice_rows
        return moves.replica_rows if has_replicas else sum(moves.counts)

    def _joined(self, pending: torch.Tensor, residual: torch.Tensor, moves: RowMoves) -> torch.Tensor:
        """The partial sum with the residual in it, each row of the residual on one rank."""
        start = 0 if self.plan.settle in (Settle.ALL_REDUCE_TP, Settle.SUM_BY_GATHER) else moves.replica_start
        if self.plan.residual_before is not None and TokenAxis.ATTN_TP in self.plan.residual_before:
            start += moves.slice_start
        elif self.comms.attn_tp.rank != 0:
            return pending
        joined = pending.clone()
        joined[start : start + residual.shape[0]] += residual
        return joined

    def _settle(self, x: torch.Tensor, moves: RowMoves) -> torch.Tensor:
        match self.plan.settle:
            case Settle.AS_IS:
                return x
            case Settle.CUT_SLICE:
                return moves.cut_slice(x)
            case Settle.REDUCE_SCATTER_TP:
                return self.comms.attn_tp.reduce_scatter(x)
            case Settle.ALL_REDUCE_TP:
                return self.comms.attn_tp.all_reduce(x)
            case Settle.CUT_REPLICA:
                return moves.cut_replica(x)
            case Settle.CUT_REPLICA_SLICE:
                return moves.cut_slice(moves.cut_replica(x))
            case Settle.RETURN_REPLICA:
                return moves.return_replica(x)
            case Settle.RETURN_SLICE:
                return moves.return_slice(x)
            case Settle.SUM_FULL:
                return self.comms.world.all_reduce(x)
            case Settle.SUM_BY_GATHER:
                return moves.gather_partials(x)

    def _gather(self, x: torch.Tensor, moves: RowMoves) -> torch.Tensor:
        match self.plan.gather:
            case Gather.TP:
                return self.comms.attn_tp.all_gather(x)
            case Gather.DP:
                return moves.gather_copies(x)
            case Gather.TP_AND_DP:
                return moves.gather_slices(x)
            case Gather.NOTHING | Gather.CP:
                return x


@functools.cache
def _splits(layout: Layout) -> tuple[bool, bool]:
    """Whether ranks of a replica hold slices, and whether replicas hold different rows; asked four times a layer."""
    return TokenAxis.ATTN_TP in layout, TokenAxis.ATTN_DP in layout
