"""Widths, places and groups as pure data."""

import pytest
from crossdock.errors import ConfigValueError
from crossdock.groups import (
    GroupAxis,
    align_rows,
    drop_unit_axes,
    drop_unit_sums,
    group_alias,
    group_ranks,
    leader_ranks,
    rank_place,
    resolve_sizes,
)
from crossdock.types.layout import ATTN_ROWS, LOCAL_ROWS, SumAxis, TokenAxis
from crossdock.types.parallel import ParallelSizes
from hypothesis import given
from hypothesis import strategies as st


def groups(sizes, axis):
    return [list(members) for members in group_ranks(sizes, axis)]


X = ParallelSizes(ranks=8, attn_dp_size=4, attn_cp_size=1, attn_tp_size=2, moe_dp_size=1, moe_ep_size=8, moe_tp_size=1)
Y = ParallelSizes(ranks=8, attn_dp_size=2, attn_cp_size=2, attn_tp_size=2, moe_dp_size=1, moe_ep_size=4, moe_tp_size=2)
Z = ParallelSizes(ranks=8, attn_dp_size=1, attn_cp_size=2, attn_tp_size=4, moe_dp_size=2, moe_ep_size=4, moe_tp_size=1)


def test_worked_example_x_four_replicas_of_two_ranks():
    assert groups(X, GroupAxis.ATTN_TP) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups(X, GroupAxis.MOE_EP) == [list(range(8))]
    assert groups(X, GroupAxis.MOE_TP) == [[rank] for rank in range(8)]
    assert leader_ranks(X) == (0, 2, 4, 6)
    assert [rank_place(X, rank).attn_dp_rank for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert group_alias(X, GroupAxis.MOE_EP) is GroupAxis.WORLD


def test_worked_example_y_context_parallel_and_expert_tensor_parallel():
    assert groups(Y, GroupAxis.ATTN_TP) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups(Y, GroupAxis.ATTN_CP) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert [rank_place(Y, rank).attn_dp_rank for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert groups(Y, GroupAxis.MOE_TP) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups(Y, GroupAxis.MOE_EP) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert groups(Y, GroupAxis.MOE_DP) == groups(Y, GroupAxis.ATTN_CP)
    assert group_alias(Y, GroupAxis.MOE_DP) is GroupAxis.ATTN_CP


def test_worked_example_z_expert_data_parallel():
    assert groups(Z, GroupAxis.ATTN_CP) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups(Z, GroupAxis.ATTN_TP) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups(Z, GroupAxis.MOE_EP) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups(Z, GroupAxis.MOE_DP) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert group_alias(Z, GroupAxis.MOE_EP) is GroupAxis.ATTN_TP


def test_zeros_are_derived_from_the_number_of_ranks():
    assert resolve_sizes(ranks=4) == ParallelSizes(
        ranks=4, attn_dp_size=1, attn_cp_size=1, attn_tp_size=4, moe_dp_size=1, moe_ep_size=4, moe_tp_size=1
    )
    assert resolve_sizes(ranks=4, attn_dp_size=2, moe_tp_size=2) == ParallelSizes(
        ranks=4, attn_dp_size=2, attn_cp_size=1, attn_tp_size=2, moe_dp_size=1, moe_ep_size=2, moe_tp_size=2
    )
    assert resolve_sizes(ranks=4, moe_ep_size=2).moe_tp_size == 2


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ({"ranks": 4, "attn_dp_size": 3}, r"attn_dp_size 3 .* is 3, must be ranks = 4"),
        ({"ranks": 4, "moe_ep_size": 3, "moe_tp_size": 2}, r"moe_ep_size 3 .* is 6, must be ranks = 4"),
        ({"ranks": 4, "moe_ep_size": -1}, r"moe_ep_size: must not be negative, found -1"),
        ({"ranks": 0}, r"ranks: must be at least 1, found 0"),
        ({"ranks": 8, "attn_cp_size": 2, "moe_dp_size": 2, "moe_ep_size": 2}, r"moe_tp_size: must be 1 .* found 2"),
        ({"ranks": 8, "moe_dp_size": 2, "moe_ep_size": 4}, r"attn_cp_size: must equal moe_dp_size 2 .* found 1"),
    ],
)
def test_widths_that_do_not_fit_are_refused_with_the_numbers(widths, message):
    with pytest.raises(ConfigValueError, match=message):
        resolve_sizes(**widths)


@st.composite
def layouts(draw):
    attn = [draw(st.integers(1, 3)) for _ in range(3)]
    ranks = attn[0] * attn[1] * attn[2]
    moe_dp = attn[1] if draw(st.booleans()) else 1
    ep_options = [width for width in range(1, ranks + 1) if (ranks // moe_dp) % width == 0]
    moe_ep = ranks // moe_dp if moe_dp > 1 else draw(st.sampled_from(ep_options))
    return ParallelSizes(
        ranks=ranks,
        attn_dp_size=attn[0],
        attn_cp_size=attn[1],
        attn_tp_size=attn[2],
        moe_dp_size=moe_dp,
        moe_ep_size=moe_ep,
        moe_tp_size=ranks // moe_dp // moe_ep,
    )


@given(layouts())
def test_groups_partition_the_ranks_and_agree_with_the_places(sizes):
    places = [rank_place(sizes, rank) for rank in range(sizes.ranks)]
    for place in places:
        assert (
            place.rank
            == (place.attn_dp_rank * sizes.attn_cp_size + place.attn_cp_rank) * sizes.attn_tp_size + place.attn_tp_rank
        )
        assert (
            place.rank
            == (place.moe_dp_rank * sizes.moe_ep_size + place.moe_ep_rank) * sizes.moe_tp_size + place.moe_tp_rank
        )
    for axis in GroupAxis:
        members = group_ranks(sizes, axis)
        assert sorted(rank for group in members for rank in group) == list(range(sizes.ranks))
        if axis is GroupAxis.WORLD or (axis is GroupAxis.MOE_DP and sizes.attn_cp_size > sizes.moe_dp_size):
            continue
        for group in members:
            assert [getattr(places[rank], f"{axis.value}_rank") for rank in group] == list(range(len(group)))


@given(layouts())
def test_an_alias_has_the_same_groups(sizes):
    for axis in GroupAxis:
        assert group_ranks(sizes, group_alias(sizes, axis)) == group_ranks(sizes, axis)


def test_axes_and_sums_of_width_one_are_dropped():
    assert drop_unit_axes(LOCAL_ROWS, X) == {TokenAxis.ATTN_DP, TokenAxis.ATTN_TP}
    assert drop_unit_axes(ATTN_ROWS, resolve_sizes(ranks=4)) == frozenset()
    assert drop_unit_sums(frozenset(SumAxis), X) == {SumAxis.ATTN_TP, SumAxis.MOE_EP}


def test_rows_are_aligned_upwards():
    assert [align_rows(rows, 2) for rows in (0, 1, 2, 3)] == [0, 2, 2, 4]


def test_a_rank_outside_the_layout_is_an_error():
    with pytest.raises(ValueError, match="rank 8 is outside"):
        rank_place(X, 8)
