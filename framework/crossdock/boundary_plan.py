"""Blocks of a model, and the boundaries between them as pure data.

Planned once at construction for all six widths; only the padding mode is read per step. Models state layouts, nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs

from crossdock.boundary_entry import BoundaryPlan, Entry, SumKind, layout_names
from crossdock.errors import MisuseError, SelectionRefused
from crossdock.groups import GroupAxis, drop_unit_axes, drop_unit_sums, group_ranks, rank_place
from crossdock.types.dispatch import DispatcherCapabilities
from crossdock.types.layout import ATTN_ROWS, COMPLETE, FULL_ROWS, LOCAL_ROWS, Layout, Owed, SumAxis
from crossdock.types.parallel import ParallelSizes


@attrs.frozen(kw_only=True)
class BlockSpec:
    """What a block takes and gives. ``input`` None: it starts the stream (embedding); ``output`` None: it ends it (head)."""

    name: str
    input: Layout | None
    output: Layout | None
    owed: Owed = COMPLETE
    is_gated_update: bool = False
    """The residual update before this block is not a plain add: it needs the finished output of the block before."""
    is_local_read: bool = False
    """What reads the residual before this block (its norm, a bank of residuals) is bound to this replica's rows."""


def plan_boundaries(blocks: Sequence[BlockSpec], sizes: ParallelSizes) -> tuple[BoundaryPlan, ...]:
    """Plans the entry of every block after the first.

    Args:
        blocks: in order; the first starts the stream, the last may end it. Axes of width 1 are dropped here.
        sizes: the parallel layout, all six widths.

    Raises:
        SelectionRefused: ``boundary_not_supported``, the facts' choice 7: no entry leads from one layout to the other.
        MisuseError: a block owes a sum over ranks that hold different rows, or a middle block lacks a layout.
    """
    plans: list[BoundaryPlan] = []
    residual: Layout | None = None
    for producer, consumer in itertools.pairwise(blocks):
        plan = _entry(producer, consumer, residual, sizes).plan()
        residual = plan.residual_after
        plans.append(plan)
    return tuple(plans)


def embedding_block() -> BlockSpec:
    """Vocabulary sharded over attn_tp: the replica's rows, owing that sum."""
    return BlockSpec(name="embedding", input=None, output=ATTN_ROWS, owed=frozenset({SumAxis.ATTN_TP}))


def attention_block(name: str) -> BlockSpec:
    """Heads sharded over attn_tp."""
    return BlockSpec(name=name, input=ATTN_ROWS, output=ATTN_ROWS, owed=frozenset({SumAxis.ATTN_TP}))


def moe_block(name: str, dispatcher: DispatcherCapabilities) -> BlockSpec:
    """Routed experts: rows and owed sums as the dispatcher declares them."""
    return BlockSpec(name=name, input=dispatcher.input_rows, output=dispatcher.output_rows, owed=dispatcher.output_owed)


def dense_block(
    name: str, dense_tp_size: int, sizes: ParallelSizes, dispatcher: DispatcherCapabilities | None
) -> BlockSpec:
    """A dense FFN: split over ``dense_tp_size`` ranks; 0 = all ranks where the MoE runs on full rows, else on own rows.

    Raises:
        SelectionRefused: ``dense_tp_size`` is neither 0, 1 nor attn_tp_size.
    """
    full_rows = dispatcher is not None and not drop_unit_axes(dispatcher.input_rows, sizes)
    if dense_tp_size == 0 and full_rows and sizes.moe_dp_size == 1:
        whole = frozenset({SumAxis.MOE_EP, SumAxis.MOE_TP})
        return BlockSpec(name=name, input=FULL_ROWS, output=FULL_ROWS, owed=whole)
    if dense_tp_size == sizes.attn_tp_size or (dense_tp_size == 0 and dispatcher is None):
        return BlockSpec(name=name, input=ATTN_ROWS, output=ATTN_ROWS, owed=frozenset({SumAxis.ATTN_TP}))
    if dense_tp_size in (0, 1):
        return BlockSpec(name=name, input=LOCAL_ROWS, output=LOCAL_ROWS)
    raise SelectionRefused(
        ["dense_tp_size_not_supported"],
        [f"dense_tp_size {dense_tp_size} is not supported: use 0, 1 or attn_tp_size {sizes.attn_tp_size}"],
    )


def head_block() -> BlockSpec:
    """Final norm and LM head on the replica's rows."""
    return BlockSpec(name="head", input=ATTN_ROWS, output=None)


def _entry(producer: BlockSpec, consumer: BlockSpec, residual: Layout | None, sizes: ParallelSizes) -> Entry:
    if producer.output is None or consumer.input is None:
        raise MisuseError(f"blocks {producer.name!r} and {consumer.name!r} cannot follow one another")
    rows = drop_unit_axes(producer.output, sizes)
    owed = drop_unit_sums(producer.owed, sizes)
    kind = sum_kind(owed, rows, sizes)
    _check_same_rows(producer.name, rows, owed, sizes)
    return Entry(
        name=consumer.name,
        producer=rows,
        owed=owed,
        sum_kind=kind or SumKind.NOTHING,
        completes_first=COMPLETE if kind else owed,
        consumer=drop_unit_axes(consumer.input, sizes),
        residual=residual,
        is_gated=consumer.is_gated_update,
        is_local_read=consumer.is_local_read,
        attn=drop_unit_axes(ATTN_ROWS, sizes),
        local=drop_unit_axes(LOCAL_ROWS, sizes),
    )


def sum_kind(owed: Owed, rows: Layout, sizes: ParallelSizes) -> SumKind | None:
    """What a combined move may settle; None for other sums (over some of the ranks that hold ``rows``), which are completed first."""
    if not owed:
        return SumKind.NOTHING
    is_replica = rows == drop_unit_axes(ATTN_ROWS, sizes)
    all_experts = drop_unit_sums(frozenset({SumAxis.MOE_EP, SumAxis.MOE_TP}), sizes)
    covers_world = sizes.moe_dp_size == 1 and owed == all_experts
    if is_replica and (owed == frozenset({SumAxis.ATTN_TP}) or (covers_world and sizes.attn_tp_size == sizes.ranks)):
        return SumKind.REPLICA
    return SumKind.WORLD if covers_world else None


def _check_same_rows(name: str, rows: Layout, owed: Owed, sizes: ParallelSizes) -> None:
    """Partial sums make sense between ranks that hold the same rows only."""
    places = [rank_place(sizes, rank) for rank in range(sizes.ranks)]
    for axis in owed:
        for members in group_ranks(sizes, GroupAxis(axis.value)):
            held = {tuple(getattr(places[rank], f"{row_axis.value}_rank") for row_axis in rows) for rank in members}
            if len(held) > 1:
                raise MisuseError(
                    f"block {name!r} says its {layout_names(rows)} rows owe a sum over {axis.value}, but ranks "
                    f"{members} hold different rows of it"
                )
