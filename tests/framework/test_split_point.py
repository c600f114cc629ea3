"""Where batches are cut: golden example and edge cases."""

import attrs
import pytest
from crossdock.groups import resolve_sizes
from crossdock.overlap_decision import OverlapRules
from crossdock.padding import make_padding
from crossdock.split_point import SplitPoint, child_plans, split_point
from crossdock.step import StepRules, decide_step
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan, StepRecord
from crossdock.types.strategy import OverlapLimits
from hypothesis import given
from hypothesis import strategies as st

PREFILL, MIXED, DECODE, IDLE = ForwardMode.PREFILL, ForwardMode.MIXED, ForwardMode.DECODE, ForwardMode.IDLE


def test_the_golden_example_is_cut_inside_its_long_sequence():
    assert split_point(PREFILL, [10, 900, 20, 30]) == SplitPoint(rows=480, sequences=2, cuts_sequence=True)


@pytest.mark.parametrize(
    ("query_lens", "expected"),
    [
        ([100, 100], SplitPoint(rows=100, sequences=1)),
        ([50, 50, 100], SplitPoint(rows=100, sequences=2)),
        ([5], SplitPoint(rows=2, sequences=1, cuts_sequence=True)),
        ([2], SplitPoint(rows=1, sequences=1, cuts_sequence=True)),
        ([1], None),
        ([1, 1], SplitPoint(rows=1, sequences=1)),
        ([1, 1, 1], SplitPoint(rows=2, sequences=2)),
        ([3, 4], SplitPoint(rows=3, sequences=1)),
        ([1, 50], SplitPoint(rows=25, sequences=2, cuts_sequence=True)),
        ([50, 1], SplitPoint(rows=25, sequences=1, cuts_sequence=True)),
    ],
)
def test_prefills_are_cut_where_both_halves_have_rows(query_lens, expected):
    assert split_point(PREFILL, query_lens) == expected
    assert split_point(MIXED, query_lens) == expected


def test_a_threshold_of_zero_never_cuts_a_sequence():
    assert split_point(PREFILL, [10, 900, 20, 30], threshold=0) == SplitPoint(rows=910, sequences=2)
    assert split_point(PREFILL, [900], threshold=0) is None


@pytest.mark.parametrize(("sequences", "rows"), [(2, 1), (3, 1), (8, 4)])
def test_decodes_are_halved(sequences, rows):
    assert split_point(DECODE, [1] * sequences) == SplitPoint(rows=rows, sequences=rows)


def test_one_decoding_sequence_cannot_be_split_and_an_idle_replica_always_can():
    assert split_point(DECODE, [1]) is None
    assert split_point(IDLE, []) == SplitPoint(rows=0, sequences=0)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.sampled_from([0.0, 0.3, 0.48, 0.5]))
def test_every_cut_leaves_each_sequence_a_row_in_each_half_that_has_it(query_lens, threshold):
    point = split_point(PREFILL, query_lens, threshold)
    if point is None:
        assert len(query_lens) == 1
        return
    assert 0 < point.rows < sum(query_lens)
    before = sum(query_lens[: point.sequences - 1])
    whole = sum(query_lens[: point.sequences])
    assert before < point.rows < whole if point.cuts_sequence else point.rows == whole


def parent(live, rows, padding_mode=PaddingMode.SUM_LEN, bucket=None):
    return StepPlan(
        step=9,
        eplb_pass=4,
        live_tokens=live,
        padded_tokens=live,
        padding_mode=padding_mode,
        forward_mode=DECODE,
        dispatch_mode=DispatchMode.NORMAL,
        overlap=True,
        overlap_reason="",
        bucket=bucket,
        overlap_rows=rows,
    )


def test_children_carry_the_padding_mode_and_their_own_counts_of_every_replica():
    sizes = resolve_sizes(ranks=4, attn_dp_size=2)
    first, second = child_plans(parent((5, 2), (2, 1)), sizes)
    assert (first.live_tokens, first.padded_tokens) == ((2, 1), (2, 2))
    assert (second.live_tokens, second.padded_tokens) == ((3, 1), (4, 2))
    first, second = child_plans(parent((5, 2), (2, 1), PaddingMode.MAX_LEN), sizes)
    assert second.padded_tokens == (4, 4)
    assert (second.step, second.eplb_pass, second.padding_mode) == (9, 4, PaddingMode.MAX_LEN)
    assert first.overlap_rows == ()


def test_children_of_a_captured_step_take_half_of_the_bucket():
    sizes = resolve_sizes(ranks=2, attn_dp_size=2)
    first, second = child_plans(parent((5, 0), (2, 0), PaddingMode.MAX_LEN, bucket=8), sizes)
    assert first.padded_tokens == second.padded_tokens == (4, 4)
    assert first.bucket == second.bucket == 4
    assert second.live_tokens == (3, 0)


def test_an_idle_replica_has_two_idle_children():
    sizes = resolve_sizes(ranks=2, attn_dp_size=2)
    plans = child_plans(parent((2, 0), (1, 0)), sizes)
    assert [plan.padded_tokens for plan in plans] == [(1, 0), (1, 0)]
    assert attrs.evolve(plans[0], live_tokens=plans[1].live_tokens) == plans[1]


@pytest.mark.parametrize(
    ("tokens", "decodes", "prefills"),
    [
        ((1, 1), False, False),
        ((1, 0), False, False),
        ((2, 0), True, True),
        ((2, 1), False, False),
        ((8, 1), False, False),
        ((8, 2), True, True),
        ((0, 0), False, False),
    ],
)
def test_tiny_and_idle_batches_overlap_on_all_ranks_or_on_none(tokens, decodes, prefills):
    """Records are all that ranks share, so the decision is theirs; a batch of one token cannot be split."""
    rules = StepRules(
        sizes=resolve_sizes(ranks=2, attn_dp_size=2),
        padding=make_padding("cost", {}),
        hidden_size=8,
        itemsize=4,
        overlap=OverlapRules(limits=OverlapLimits(is_gated=False)),
    )
    for mode, expected in ((DECODE, decodes), (PREFILL, prefills)):
        plan = decide_step([voted(mode, rows) for rows in tokens], rules)
        assert plan.overlap is expected, mode
        if plan.overlap:
            first, second = child_plans(plan, rules.sizes)
            assert all(max(child.live_tokens) > 0 for child in (first, second))
            assert [a + b for a, b in zip(first.live_tokens, second.live_tokens, strict=True)] == list(tokens)


def voted(mode, rows):
    """The record of a replica with so many decoding sequences, or one prompt of so many tokens."""
    own = mode if rows else IDLE
    point = split_point(own, [1] * rows if mode is DECODE else [rows] * bool(rows))
    return StepRecord(
        num_tokens=rows,
        local_forward_mode=own,
        is_prefill_in_batch=int(own is PREFILL),
        local_can_run_overlap=int(point is not None),
        overlap_rows=point.rows if point else 0,
    )
