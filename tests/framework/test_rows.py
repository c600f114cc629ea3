"""Rows owe sums that are taken once."""

import math

import pytest
import torch
from crossdock.comm import local_comms
from crossdock.errors import RowsMisuse
from crossdock.groups import resolve_sizes
from crossdock.rows import Rows, axis_comm, complete_rows, sum_groups
from crossdock.testing.world import OneProcessWorld
from crossdock.types.layout import ATTN_ROWS, COMPLETE, FULL_ROWS, LOCAL_ROWS, SumAxis
from hypothesis import given, settings
from hypothesis import strategies as st

FOUR = resolve_sizes(ranks=4, attn_dp_size=2, moe_ep_size=2)
MOE_SUM = frozenset({SumAxis.MOE_EP, SumAxis.MOE_TP})


def in_world(function):
    """Runs on all four ranks of a 2 x 2 world; results in rank order."""
    return OneProcessWorld(FOUR).run(lambda context: function(context.rank, context.comms_of(FOUR)))


def test_a_tensor_that_owes_a_sum_cannot_be_used_as_complete():
    def use(rank, comms):
        rows = Rows(torch.ones(2, 3), ATTN_ROWS, frozenset({SumAxis.ATTN_TP}), comms)
        with pytest.raises(RowsMisuse, match=r"\[2, 3\] .* owe a sum over \{attn_tp\}"):
            _ = rows.value
        return rows.complete().value.sum().item()

    assert in_world(use) == [12.0] * 4


def test_a_sum_cannot_be_taken_twice():
    def twice(rank, comms):
        rows = Rows(torch.ones(1, 1), FULL_ROWS, MOE_SUM, comms)
        done = rows.complete()
        with pytest.raises(RowsMisuse, match="were completed before"):
            rows.complete()
        with pytest.raises(RowsMisuse, match=r"asked for the sum over \{moe_ep\}, these rows owe \{\}"):
            done.complete({SumAxis.MOE_EP})
        assert done.complete() is done
        return done.value.item()

    assert in_world(twice) == [4.0] * 4


def test_a_sum_over_one_axis_leaves_the_other_owed():
    def stepwise(rank, comms):
        rows = Rows(torch.full((1, 1), float(10**rank)), FULL_ROWS, MOE_SUM, comms).complete({SumAxis.MOE_TP})
        return rows.partial.item(), rows.owed, rows.complete().value.item()

    results = in_world(stepwise)
    assert [result[0] for result in results] == [11.0, 11.0, 1100.0, 1100.0]
    assert all(result[1:] == (frozenset({SumAxis.MOE_EP}), 1111.0) for result in results)


def test_both_expert_sums_are_one_reduction_over_all_ranks():
    def groups(rank, comms):
        return [group.ranks for group in sum_groups(MOE_SUM, comms)]

    assert in_world(groups) == [[(0, 1, 2, 3)]] * 4


def test_adding_needs_equal_owed_sums_and_equal_rows():
    def add(rank, comms):
        owed = frozenset({SumAxis.ATTN_TP})
        with pytest.raises(RowsMisuse, match=r"owe \{\} to rows that owe \{attn_tp\}"):
            Rows(torch.ones(2, 1), ATTN_ROWS, owed, comms).add(complete_rows(torch.ones(2, 1), ATTN_ROWS, comms))
        with pytest.raises(RowsMisuse, match=r"different rows"):
            Rows(torch.ones(2, 1), ATTN_ROWS, owed, comms).add(Rows(torch.ones(2, 1), LOCAL_ROWS, owed, comms))
        with pytest.raises(RowsMisuse, match=r"different rows"):
            Rows(torch.ones(2, 1), ATTN_ROWS, owed, comms).add(Rows(torch.ones(1, 1), ATTN_ROWS, owed, comms))
        both = Rows(torch.ones(2, 1), ATTN_ROWS, owed, comms).add(Rows(torch.ones(2, 1), ATTN_ROWS, owed, comms))
        return both.complete().value.tolist()

    assert in_world(add) == [[[4.0], [4.0]]] * 4


def test_a_finished_tensor_enters_a_sum_once():
    def add(rank, comms):
        rows = Rows(torch.ones(1, 1), FULL_ROWS, MOE_SUM, comms).add_complete(torch.full((1, 1), 100.0))
        return rows.complete().value.item()

    assert in_world(add) == [104.0] * 4


def test_a_finished_tensor_that_still_owes_is_refused():
    def add(rank, comms):
        rows = Rows(torch.ones(1, 1), FULL_ROWS, MOE_SUM, comms)
        with pytest.raises(RowsMisuse, match="used as complete"):
            rows.add_complete(Rows(torch.ones(1, 1), FULL_ROWS, frozenset({SumAxis.MOE_TP}), comms))

    in_world(add)


def test_deferring_spends_the_handle_and_is_refused_for_a_finished_tensor():
    def defer(rank, comms):
        rows = Rows(torch.ones(1, 1), FULL_ROWS, MOE_SUM, comms)
        handed = rows.defer()
        with pytest.raises(RowsMisuse, match="were deferred before"):
            rows.complete()
        with pytest.raises(RowsMisuse, match="owe nothing"):
            complete_rows(torch.ones(1, 1), FULL_ROWS, comms).defer()
        return handed.complete().value.item()

    assert in_world(defer) == [4.0] * 4


def test_on_one_rank_nothing_is_owed_and_layouts_are_equal():
    rows = Rows(torch.ones(2, 2), LOCAL_ROWS, frozenset(SumAxis), local_comms())
    assert rows.owed == COMPLETE and rows.layout == FULL_ROWS
    assert rows.complete() is rows and rows.add(rows).value.sum() == 8
    assert rows.num_rows == 2


def test_zero_rows_join_the_sum():
    def empty(rank, comms):
        return tuple(Rows(torch.zeros(0, 5), FULL_ROWS, MOE_SUM, comms).complete().value.shape)

    assert in_world(empty) == [(0, 5)] * 4


OPERATIONS = st.lists(st.sampled_from(["add", "add_complete", "complete", "complete_one", "defer"]), max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    operations=OPERATIONS,
    owed=st.sets(st.sampled_from(list(SumAxis))).map(frozenset),
    widths=st.sampled_from([(1, 1), (2, 2), (1, 4), (4, 4), (2, 1), (4, 2)]),
)
def test_any_chain_equals_the_sum_in_one_process(operations, owed, widths):
    """Each rank holds whole numbers; the reference adds all of them with no notion of groups."""
    if SumAxis.ATTN_TP in owed:
        owed = frozenset({SumAxis.ATTN_TP})
    sizes = resolve_sizes(ranks=4, attn_dp_size=widths[0], moe_ep_size=widths[1])

    def summed_ranks(rank, comms):
        return {peer for group in sum_groups(owed, comms) for peer in group.ranks} or {rank}

    def chain(context):
        rank, comms = context.rank, context.comms_of(sizes)
        rows = Rows(torch.tensor([[float(2**rank)]]), FULL_ROWS, owed, comms)
        if len(sum_groups(rows.owed, comms)) > 1:
            return None
        addends = summed_ranks(rank, comms) if rows.owed else {rank}
        expected = float(sum(2**peer for peer in addends))
        for step, operation in enumerate(operations):
            match operation:
                case "add":
                    value = float(3**step)
                    rows = rows.add(Rows(torch.tensor([[value]]), FULL_ROWS, rows.owed, comms))
                    expected += value * math.prod(axis_comm(axis, comms).size for axis in rows.owed)
                case "add_complete":
                    rows = rows.add_complete(torch.tensor([[7.0]]))
                    expected += 7.0
                case "complete":
                    rows = rows.complete()
                case "complete_one" if rows.owed:
                    rows = rows.complete({min(rows.owed, key=lambda axis: axis.value)})
                case "defer" if rows.owed:
                    rows = rows.defer()
        return rows.complete().value.item(), expected

    for result in OneProcessWorld(sizes).run(chain):
        assert result is None or result[0] == result[1]
