"""Rules 1 to 5 of the facts, section 2, and golden values A6."""

import attrs
import pytest
from crossdock.padding import make_padding, padded_tokens, slot_offsets
from crossdock.types.step import PaddingMode, StepCounts

MAX_LEN, SUM_LEN = PaddingMode.MAX_LEN, PaddingMode.SUM_LEN


def counts(*tokens, **changes):
    return attrs.evolve(
        StepCounts(tokens=tokens, is_prefill_in_batch=False, hidden_size=64, itemsize=4, attn_tp_size=1), **changes
    )


@pytest.fixture
def cost():
    return make_padding("cost", {})


@pytest.mark.parametrize(
    ("tokens", "mode", "rows"),
    [
        ((8, 8, 8, 8), MAX_LEN, 32),
        ((8, 1, 1, 1), SUM_LEN, 11),
        ((8, 4, 2, 2), MAX_LEN, 32),
        ((0, 0, 0, 0), MAX_LEN, 0),
    ],
)
def test_golden_values_a6(cost, tokens, mode, rows):
    assert cost.choose(counts(*tokens)) is mode
    assert sum(padded_tokens(mode, tokens)) == rows


def test_the_worked_example_of_the_facts(cost):
    aligned = (6, 4, 0, 8)
    mode = cost.choose(counts(*aligned, attn_tp_size=2))
    assert mode is MAX_LEN
    padded = padded_tokens(mode, aligned)
    assert padded == (8, 8, 8, 8)
    assert slot_offsets(padded) == (0, 8, 16, 24)


def test_a_back_end_that_needs_equal_blocks_gets_them_even_in_a_prefill(cost):
    assert cost.choose(counts(300, 0, 0, 1, symmetric_counts_required=True, is_prefill_in_batch=True)) is MAX_LEN


def test_a_prefill_is_not_padded_to_the_longest_prompt(cost):
    assert cost.choose(counts(300, 300, is_prefill_in_batch=True)) is SUM_LEN


def test_hybrid_state_with_an_empty_replica_is_padded_in_a_prefill(cost):
    assert cost.choose(counts(300, 0, is_prefill_in_batch=True, has_hybrid_state=True)) is MAX_LEN
    assert cost.choose(counts(300, 1, is_prefill_in_batch=True, has_hybrid_state=True)) is SUM_LEN


def test_one_replica_has_equal_blocks_anyway(cost):
    assert cost.choose(counts(300, is_prefill_in_batch=True)) is MAX_LEN


def test_a_small_buffer_goes_as_one_all_reduce_where_there_is_a_kernel_for_it(cost):
    limit = 32 * 64 * 4
    assert cost.choose(counts(8, 8, 8, 8, variable_all_reduce_max_bytes=limit)) is SUM_LEN
    assert cost.choose(counts(8, 8, 8, 9, variable_all_reduce_max_bytes=limit)) is MAX_LEN
    assert cost.choose(counts(8, 8, 8, 0, variable_all_reduce_max_bytes=limit)) is MAX_LEN


def test_captured_steps_have_equal_slots(cost):
    assert cost.captured_mode() is MAX_LEN
