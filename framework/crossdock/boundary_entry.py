"""The entry of one block as pure data: which moves lead from the layout before to the layout it takes (the facts, section 5)."""

from __future__ import annotations

import enum

import attrs

from crossdock.errors import SelectionRefused
from crossdock.types.layout import FULL_ROWS, Layout, Owed, TokenAxis


class EntryChoice(enum.IntEnum):
    """How a block is entered; the numbers are the facts' (7 is a refusal)."""

    CUT_TO_SLICE = 1
    """Sum and cut in one reduce-scatter (or a plain cut), update and norm on the slice."""
    KEEP_SLICE = 2
    """The residual lives on slices but the block takes more: reduce-scatter, update and norm on the slice, gather."""
    GATHER_CP = 3
    """Finish on the own chunk, then gather over attention CP."""
    GATHER_SLICES = 4
    """Finished slices: update and norm on the slice, then gather."""
    IN_PLACE = 5
    """Nothing is gathered: settle the sum, update, norm."""
    SUM_BY_GATHER = 6
    """The gather's own sum completes the tensor; the residual joined it before, the norm runs on the gathered rows."""
    LOCAL_THEN_GATHER = 8
    """The second form of the facts' choice 6: settle, update and norm on the replica's rows, then gather copies."""


class Settle(enum.Enum):
    """How the output of the block before becomes the rows on which update and norm run."""

    AS_IS = "as_is"
    CUT_SLICE = "cut_slice"
    """Own 1/attn_tp slice of finished replica rows."""
    REDUCE_SCATTER_TP = "reduce_scatter_tp"
    """Sum over attn_tp, own slice of it."""
    ALL_REDUCE_TP = "all_reduce_tp"
    CUT_REPLICA = "cut_replica"
    """Own slot of finished full rows."""
    CUT_REPLICA_SLICE = "cut_replica_slice"
    """Own slice of the own slot of finished full rows."""
    RETURN_REPLICA = "return_replica"
    """Sum over all ranks of full rows, own slot of it."""
    RETURN_SLICE = "return_slice"
    """Sum over all ranks of full rows, own slice of the own slot."""
    SUM_FULL = "sum_full"
    """Sum over all ranks of full rows; the residual joins it."""
    SUM_BY_GATHER = "sum_by_gather"
    """Sum over attn_tp while gathering over replicas; the residual joins it."""


class Gather(enum.Enum):
    """What is gathered after the norm."""

    NOTHING = "nothing"
    TP = "tp"
    """Slices to the replica's rows."""
    DP = "dp"
    """Copies of the replica's rows to full rows."""
    TP_AND_DP = "tp_and_dp"
    """Slices to full rows."""
    CP = "cp"


@attrs.frozen(kw_only=True)
class BoundaryPlan:
    """One entry, for one parallel layout. Layouts have no axis of width 1."""

    name: str
    """Of the block that is entered."""
    choice: EntryChoice
    producer: Layout
    owed: Owed
    residual_before: Layout | None
    """None where the stream begins."""
    work: Layout
    """Rows on which update and norm run."""
    residual_after: Layout
    input: Layout
    settle: Settle
    joins_residual: bool
    """The residual is added to the partial sum before it is taken."""
    completes_first: Owed
    """Sums that no combined move can take: all-reduced before anything else."""
    gather: Gather
    is_gated_update: bool


class SumKind(enum.Enum):
    """How an owed sum is taken on the way into a block."""

    NOTHING = "nothing"
    REPLICA = "replica"
    """Over the attention-TP ranks of one replica."""
    WORLD = "world"


@attrs.frozen(kw_only=True)
class Entry:
    """The inputs of one decision, normalised."""

    name: str
    """Of the consumer."""
    producer: Layout
    owed: Owed
    sum_kind: SumKind
    completes_first: Owed
    consumer: Layout
    residual: Layout | None
    is_gated: bool
    is_local_read: bool
    attn: Layout
    local: Layout

    @property
    def joins(self) -> bool:
        """A plain add may be taken inside the sum, and the norm may run wherever the sum ends."""
        return not self.is_gated and self.sum_kind is not SumKind.NOTHING

    @property
    def residual_is_slice(self) -> bool:
        return self.residual == self.local != self.attn

    def plan(self) -> BoundaryPlan:
        if self.producer - self.consumer == frozenset({TokenAxis.ATTN_CP}) and self.consumer <= self.producer:
            return self._gather_cp()
        known = (FULL_ROWS, self.attn, self.local)
        if self.producer not in known or self.consumer not in known:
            raise self._refused()
        if self.producer == self.attn:
            return self._from_replica_rows()
        if self.producer == self.local:
            return self._from_slices()
        return self._from_full_rows()

    def _from_replica_rows(self) -> BoundaryPlan:
        owes = self.sum_kind is not SumKind.NOTHING
        to_slice = Settle.REDUCE_SCATTER_TP if owes else Settle.CUT_SLICE
        to_replica = Settle.ALL_REDUCE_TP if owes else Settle.AS_IS
        if self.consumer == self.attn:
            whole_world = self.attn == FULL_ROWS
            if self.residual_is_slice and (whole_world or not self.joins):
                return self._made(EntryChoice.KEEP_SLICE, to_slice, self.local, Gather.TP)
            return self._made(EntryChoice.IN_PLACE, to_replica, self.attn, joins=self.residual_is_slice)
        if self.consumer == self.local:
            return self._made(EntryChoice.CUT_TO_SLICE, to_slice, self.local)
        if self.joins and not self.is_local_read:
            return self._made(EntryChoice.SUM_BY_GATHER, Settle.SUM_BY_GATHER, FULL_ROWS, joins=True)
        if self.residual_is_slice:
            return self._made(EntryChoice.KEEP_SLICE, to_slice, self.local, Gather.TP_AND_DP)
        return self._made(EntryChoice.LOCAL_THEN_GATHER, to_replica, self.attn, Gather.DP)

    def _from_slices(self) -> BoundaryPlan:
        if self.consumer == self.local:
            return self._made(EntryChoice.IN_PLACE, Settle.AS_IS, self.local)
        gather = Gather.TP if self.consumer == self.attn else Gather.TP_AND_DP
        return self._made(EntryChoice.GATHER_SLICES, Settle.AS_IS, self.local, gather)

    def _from_full_rows(self) -> BoundaryPlan:
        owes = self.sum_kind is not SumKind.NOTHING
        to_slice = Settle.RETURN_SLICE if owes else Settle.CUT_REPLICA_SLICE
        to_replica = Settle.RETURN_REPLICA if owes else Settle.CUT_REPLICA
        if self.consumer == self.local != self.attn:
            return self._made(EntryChoice.CUT_TO_SLICE, to_slice, self.local)
        if self.consumer == FULL_ROWS and self.joins and not self.is_local_read:
            return self._made(EntryChoice.IN_PLACE, Settle.SUM_FULL, FULL_ROWS, joins=True)
        if self.residual_is_slice:
            gather = Gather.TP if self.consumer == self.attn else Gather.TP_AND_DP
            return self._made(EntryChoice.KEEP_SLICE, to_slice, self.local, gather)
        if self.consumer == self.attn:
            return self._made(EntryChoice.IN_PLACE, to_replica, self.attn)
        return self._made(EntryChoice.LOCAL_THEN_GATHER, to_replica, self.attn, Gather.DP)

    def _gather_cp(self) -> BoundaryPlan:
        """Data only: a start with attn_cp above 1 is refused."""
        if self.residual not in (None, self.producer):
            raise self._refused()
        settle = Settle.AS_IS if self.sum_kind is SumKind.NOTHING else Settle.ALL_REDUCE_TP
        return self._made(EntryChoice.GATHER_CP, settle, self.producer, Gather.CP)

    def _made(
        self,
        choice: EntryChoice,
        settle: Settle,
        work: Layout,
        gather: Gather = Gather.NOTHING,
        joins: bool = False,
    ) -> BoundaryPlan:
        return BoundaryPlan(
            name=self.name,
            choice=choice,
            producer=self.producer,
            owed=self.owed,
            residual_before=self.residual,
            work=work,
            residual_after=self.attn if work == FULL_ROWS else work,
            input=self.consumer,
            settle=settle,
            joins_residual=joins,
            completes_first=self.completes_first,
            gather=gather,
            is_gated_update=self.is_gated,
        )

    def _refused(self) -> SelectionRefused:
        return SelectionRefused(
            ["boundary_not_supported"],
            [
                f"block {self.name!r} takes {layout_names(self.consumer)} rows but gets {layout_names(self.producer)} "
                f"rows (residual {layout_names(self.residual)}): no entry leads there; "
                "use layouts that differ in attn_dp and attn_tp only"
            ],
        )


def layout_names(layout: Layout | None) -> str:
    """``{attn_dp, attn_tp}`` for messages."""
    return "no" if layout is None else "{" + ", ".join(sorted(axis.value for axis in layout)) + "}"
