"""Live rows of each layout against a list of all rows."""

from crossdock.groups import rank_place, resolve_sizes
from crossdock.row_mask import live_mask, live_spans, padded_spans, rows_in
from crossdock.types.layout import ATTN_ROWS, FULL_ROWS, LOCAL_ROWS
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan
from hypothesis import given
from hypothesis import strategies as st


def step_of(live, padded):
    return StepPlan(
        step=1,
        eplb_pass=0,
        live_tokens=tuple(live),
        padded_tokens=tuple(padded),
        padding_mode=PaddingMode.SUM_LEN,
        forward_mode=ForwardMode.DECODE,
        dispatch_mode=DispatchMode.NORMAL,
        overlap=False,
        overlap_reason="off",
    )


def test_three_live_rows_padded_to_eight_beside_an_idle_replica():
    sizes = resolve_sizes(ranks=4, attn_dp_size=2)
    step = step_of([3, 0], [8, 8])
    assert live_spans(FULL_ROWS, step, sizes, rank_place(sizes, 3)) == ((0, 3),)
    assert padded_spans(FULL_ROWS, step, sizes, rank_place(sizes, 3)) == ((3, 16),)
    assert [live_spans(ATTN_ROWS, step, sizes, rank_place(sizes, rank)) for rank in range(4)] == [
        ((0, 3),),
        ((0, 3),),
        (),
        (),
    ]
    assert [live_spans(LOCAL_ROWS, step, sizes, rank_place(sizes, rank)) for rank in range(4)] == [
        ((0, 3),),
        (),
        (),
        (),
    ]
    assert padded_spans(LOCAL_ROWS, step, sizes, rank_place(sizes, 2)) == ((0, 4),)


def test_the_live_rows_of_several_replicas_lie_in_their_slots():
    sizes = resolve_sizes(ranks=3, attn_dp_size=3)
    step = step_of([2, 0, 1], [2, 1, 4])
    place = rank_place(sizes, 0)
    assert live_spans(FULL_ROWS, step, sizes, place) == ((0, 2), (3, 4))
    assert padded_spans(FULL_ROWS, step, sizes, place) == ((2, 3), (4, 7))
    assert live_mask(FULL_ROWS, step, sizes, place).tolist() == [True, True, False, True, False, False, False]


@given(
    attn_dp=st.integers(1, 3),
    attn_tp=st.integers(1, 3),
    data=st.data(),
)
def test_slices_tile_replica_rows_and_replica_rows_tile_full_rows(attn_dp, attn_tp, data):
    sizes = resolve_sizes(ranks=attn_dp * attn_tp, attn_dp_size=attn_dp)
    padded = [data.draw(st.integers(0, 3)) * attn_tp for _ in range(attn_dp)]
    step = step_of([data.draw(st.integers(0, rows)) for rows in padded], padded)
    places = [rank_place(sizes, rank) for rank in range(sizes.ranks)]
    full = live_mask(FULL_ROWS, step, sizes, places[0]).tolist()
    slices = [live_mask(LOCAL_ROWS, step, sizes, place).tolist() for place in places]
    replicas = [live_mask(ATTN_ROWS, step, sizes, place).tolist() for place in places[::attn_tp]]
    assert [row for rows in slices for row in rows] == full
    assert [row for rows in replicas for row in rows] == full
    assert sum(full) == sum(step.live_tokens)
    for layout in (FULL_ROWS, ATTN_ROWS, LOCAL_ROWS):
        for place in places:
            covered = [*live_spans(layout, step, sizes, place), *padded_spans(layout, step, sizes, place)]
            rows = sorted(row for start, stop in covered for row in range(start, stop))
            assert rows == list(range(rows_in(layout, step, sizes, place)))


def test_counts_of_a_step_without_rows_give_no_spans():
    sizes = resolve_sizes(ranks=2, attn_dp_size=2)
    step = step_of([0, 0], [0, 0])
    assert live_spans(FULL_ROWS, step, sizes, rank_place(sizes, 1)) == ()
    assert padded_spans(LOCAL_ROWS, step, sizes, rank_place(sizes, 1)) == ()
