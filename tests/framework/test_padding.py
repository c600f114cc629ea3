"""What a padding mode does to counts."""

from crossdock.groups import rank_place, resolve_sizes
from crossdock.padding import choose_padding, make_padding, padded_tokens, slot_offsets
from crossdock.row_mask import live_spans
from crossdock.step import StepRules, decide_step
from crossdock.types.layout import FULL_ROWS
from crossdock.types.step import ForwardMode, PaddingMode, StepCounts, StepRecord
from hypothesis import given
from hypothesis import strategies as st

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=8)


@given(COUNTS, st.sampled_from(list(PaddingMode)))
def test_every_replica_fits_its_slot_and_slots_tile_the_buffer(tokens, mode):
    padded = padded_tokens(mode, tokens)
    offsets = slot_offsets(padded)
    assert all(rows >= live for rows, live in zip(padded, tokens, strict=True))
    assert [start + rows for start, rows in zip(offsets, padded, strict=True)] == [*offsets[1:], sum(padded)]


def test_sum_len_pads_nothing_and_max_len_everything_to_the_largest():
    assert padded_tokens(PaddingMode.SUM_LEN, [6, 4, 0, 8]) == (6, 4, 0, 8)
    assert padded_tokens(PaddingMode.MAX_LEN, [6, 4, 0, 8]) == (8, 8, 8, 8)


def test_equal_blocks_are_forced_where_a_back_end_needs_them():
    counts = StepCounts(
        tokens=(3, 1),
        is_prefill_in_batch=True,
        hidden_size=8,
        itemsize=4,
        attn_tp_size=1,
        symmetric_counts_required=True,
    )
    assert choose_padding(make_padding("sum_len", {}), counts) is PaddingMode.MAX_LEN


def test_the_worked_example_of_the_layout_page():
    sizes = resolve_sizes(ranks=8, attn_dp_size=4)
    records = [
        StepRecord(num_tokens=rows, local_forward_mode=ForwardMode.DECODE if rows else ForwardMode.IDLE)
        for rows in (5, 3, 0, 8)
    ]
    rules = StepRules(sizes=sizes, padding=make_padding("cost", {}), hidden_size=64, itemsize=4)
    plan = decide_step(records, rules)
    assert plan.padded_tokens == (8, 8, 8, 8) and plan.buffer_rows == 32
    assert live_spans(FULL_ROWS, plan, sizes, rank_place(sizes, 0)) == ((0, 5), (8, 11), (24, 32))
    assert slot_offsets(padded_tokens(PaddingMode.SUM_LEN, (6, 4, 0, 8))) == (0, 6, 10, 10)
