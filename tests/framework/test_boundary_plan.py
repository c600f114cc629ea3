"""Entry choices of the facts, section 5, as pure data."""

import pytest
from crossdock.boundary_entry import EntryChoice, Gather, Settle
from crossdock.boundary_plan import (
    BlockSpec,
    attention_block,
    dense_block,
    embedding_block,
    head_block,
    moe_block,
    plan_boundaries,
)
from crossdock.errors import MisuseError, SelectionRefused
from crossdock.groups import resolve_sizes
from crossdock.types.dispatch import DispatcherCapabilities, ReceiveLayout
from crossdock.types.layout import ATTN_ROWS, COMPLETE, CP_SHARDS, FULL_ROWS, LOCAL_ROWS, SumAxis, TokenAxis

DP, TP = TokenAxis.ATTN_DP, TokenAxis.ATTN_TP
GATHER = DispatcherCapabilities(
    layouts=frozenset({ReceiveLayout.REPLICATED}),
    input_rows=FULL_ROWS,
    output_rows=FULL_ROWS,
    output_owed=frozenset({SumAxis.MOE_EP, SumAxis.MOE_TP}),
    needs_full_ep=False,
    rank_invariant_picks_needed=True,
)
ALL_TO_ALL = DispatcherCapabilities(
    layouts=frozenset({ReceiveLayout.TOKEN_ROWS}),
    input_rows=LOCAL_ROWS,
    output_rows=LOCAL_ROWS,
    output_owed=COMPLETE,
    needs_full_ep=True,
    rank_invariant_picks_needed=False,
)
ATTENTION = attention_block("attention")


def choices(plans):
    return [(plan.choice, plan.settle, plan.gather) for plan in plans]


def plans_of(sizes, *blocks):
    return plan_boundaries([embedding_block(), *blocks, head_block()], sizes)


def test_full_row_experts_use_the_gather_as_the_sum_and_return_by_a_scatter():
    sizes = resolve_sizes(ranks=4, attn_dp_size=2)
    plans = plans_of(sizes, ATTENTION, moe_block("moe", GATHER), ATTENTION, moe_block("moe", GATHER))
    assert choices(plans) == [
        (EntryChoice.IN_PLACE, Settle.ALL_REDUCE_TP, Gather.NOTHING),
        (EntryChoice.SUM_BY_GATHER, Settle.SUM_BY_GATHER, Gather.NOTHING),
        (EntryChoice.IN_PLACE, Settle.RETURN_REPLICA, Gather.NOTHING),
        (EntryChoice.SUM_BY_GATHER, Settle.SUM_BY_GATHER, Gather.NOTHING),
        (EntryChoice.IN_PLACE, Settle.RETURN_REPLICA, Gather.NOTHING),
    ]
    assert all(plan.residual_after == {DP} for plan in plans)


def test_all_to_all_experts_keep_the_residual_on_slices():
    sizes = resolve_sizes(ranks=4, attn_dp_size=2)
    plans = plans_of(sizes, ATTENTION, moe_block("a2a", ALL_TO_ALL), ATTENTION, moe_block("a2a", ALL_TO_ALL))
    assert choices(plans) == [
        (EntryChoice.IN_PLACE, Settle.ALL_REDUCE_TP, Gather.NOTHING),
        (EntryChoice.CUT_TO_SLICE, Settle.REDUCE_SCATTER_TP, Gather.NOTHING),
        (EntryChoice.GATHER_SLICES, Settle.AS_IS, Gather.TP),
        (EntryChoice.CUT_TO_SLICE, Settle.REDUCE_SCATTER_TP, Gather.NOTHING),
        (EntryChoice.GATHER_SLICES, Settle.AS_IS, Gather.TP),
    ]
    assert [plan.residual_after for plan in plans] == [{DP}, {DP, TP}, {DP, TP}, {DP, TP}, {DP, TP}]


def test_a_residual_on_slices_joins_the_sum_of_replica_rows():
    sizes = resolve_sizes(ranks=4, attn_dp_size=2)
    dense = dense_block("dense", 2, sizes, ALL_TO_ALL)
    plans = plans_of(sizes, ATTENTION, moe_block("a2a", ALL_TO_ALL), ATTENTION, dense)
    assert (plans[3].choice, plans[3].settle, plans[3].joins_residual) == (
        EntryChoice.IN_PLACE,
        Settle.ALL_REDUCE_TP,
        True,
    )
    assert plans[3].residual_after == {DP}


def test_a_residual_on_slices_stays_there_when_one_replica_is_the_world():
    sizes = resolve_sizes(ranks=4)
    plans = plans_of(sizes, ATTENTION, moe_block("a2a", ALL_TO_ALL), ATTENTION, moe_block("moe", GATHER))
    assert (plans[3].choice, plans[3].settle, plans[3].gather) == (
        EntryChoice.KEEP_SLICE,
        Settle.REDUCE_SCATTER_TP,
        Gather.TP,
    )
    assert plans[3].residual_after == {TP}


@pytest.mark.parametrize("reason", ["is_gated_update", "is_local_read"])
def test_gated_updates_and_local_reads_finish_before_the_gather(reason):
    sizes = resolve_sizes(ranks=4, attn_dp_size=2)
    moe = BlockSpec(name="moe", input=FULL_ROWS, output=FULL_ROWS, owed=GATHER.output_owed, **{reason: True})
    plan = plans_of(sizes, ATTENTION, moe)[1]
    assert (plan.choice, plan.settle, plan.gather) == (
        EntryChoice.LOCAL_THEN_GATHER,
        Settle.ALL_REDUCE_TP,
        Gather.DP,
    )
    assert plan.work == {DP}


def test_without_attention_tp_nothing_is_owed_and_slices_are_replica_rows():
    sizes = resolve_sizes(ranks=2, attn_dp_size=2)
    plans = plans_of(sizes, ATTENTION, moe_block("a2a", ALL_TO_ALL), ATTENTION, moe_block("moe", GATHER))
    assert choices(plans) == [
        (EntryChoice.IN_PLACE, Settle.AS_IS, Gather.NOTHING),
        (EntryChoice.IN_PLACE, Settle.AS_IS, Gather.NOTHING),
        (EntryChoice.IN_PLACE, Settle.AS_IS, Gather.NOTHING),
        (EntryChoice.LOCAL_THEN_GATHER, Settle.AS_IS, Gather.DP),
        (EntryChoice.IN_PLACE, Settle.RETURN_REPLICA, Gather.NOTHING),
    ]


def test_one_rank_moves_nothing():
    sizes = resolve_sizes(ranks=1)
    for capabilities in (GATHER, ALL_TO_ALL):
        plans = plans_of(sizes, ATTENTION, moe_block("moe", capabilities), ATTENTION)
        assert set(choices(plans)) == {(EntryChoice.IN_PLACE, Settle.AS_IS, Gather.NOTHING)}


def test_dense_blocks_follow_dense_tp_size_and_the_dispatchers_rows():
    sizes = resolve_sizes(ranks=4, attn_dp_size=2)
    whole = dense_block("dense", 0, sizes, GATHER)
    assert (whole.input, whole.owed) == (FULL_ROWS, {SumAxis.MOE_EP, SumAxis.MOE_TP})
    assert dense_block("dense", 1, sizes, GATHER) == BlockSpec(name="dense", input=LOCAL_ROWS, output=LOCAL_ROWS)
    assert dense_block("dense", 2, sizes, ALL_TO_ALL).owed == {SumAxis.ATTN_TP}
    assert dense_block("dense", 0, sizes, ALL_TO_ALL).input == LOCAL_ROWS
    assert dense_block("dense", 0, sizes, None).input == ATTN_ROWS
    with pytest.raises(SelectionRefused, match="dense_tp_size 3 is not supported: use 0, 1 or attn_tp_size 2"):
        dense_block("dense", 3, sizes, GATHER)


def test_a_gather_over_attention_cp_alone_is_planned_as_data():
    sizes = resolve_sizes(ranks=8, attn_dp_size=2, attn_cp_size=2)
    block = BlockSpec(name="block", input=frozenset({DP}), output=frozenset({DP}))
    plan = plan_boundaries([embedding_block(), block], sizes)[0]
    assert (plan.choice, plan.settle, plan.gather) == (EntryChoice.GATHER_CP, Settle.ALL_REDUCE_TP, Gather.CP)


def test_layouts_without_an_entry_are_refused_at_construction():
    sizes = resolve_sizes(ranks=8, attn_dp_size=2, attn_cp_size=2)
    shards = BlockSpec(name="shards", input=CP_SHARDS, output=CP_SHARDS)
    with pytest.raises(
        SelectionRefused, match=r"'shards' takes \{attn_cp\} rows but gets \{attn_cp, attn_dp\}"
    ) as refused:
        plan_boundaries([embedding_block(), shards], sizes)
    assert refused.value.codes == ("boundary_not_supported",)


def test_a_sum_over_ranks_that_hold_different_rows_is_refused():
    sizes = resolve_sizes(ranks=4, attn_dp_size=2)
    wrong = BlockSpec(name="wrong", input=ATTN_ROWS, output=ATTN_ROWS, owed=frozenset({SumAxis.MOE_EP}))
    with pytest.raises(MisuseError, match=r"'wrong' says its .* moe_ep, but ranks \(0, 1, 2, 3\) hold different rows"):
        plan_boundaries([embedding_block(), wrong, head_block()], sizes)


def test_a_head_in_the_middle_is_a_mistake():
    with pytest.raises(MisuseError, match="'head' and 'attention' cannot follow"):
        plan_boundaries([embedding_block(), head_block(), ATTENTION], resolve_sizes(ranks=2))
