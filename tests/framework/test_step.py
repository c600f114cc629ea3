"""Global decisions of a step, pure functions of the records."""

import attrs
import pytest
from crossdock.errors import AgreementError
from crossdock.groups import resolve_sizes
from crossdock.overlap_decision import OverlapRules
from crossdock.padding import make_padding
from crossdock.step import StepRules, decide_step, needs_idle_batch
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepRecord
from crossdock.types.strategy import OverlapLimits
from hypothesis import given
from hypothesis import strategies as st

BOTH_PROTOCOLS = frozenset(DispatchMode)
ALWAYS = OverlapRules(limits=OverlapLimits(is_gated=False))


def rules(replicas, attn_tp=1, **changes):
    return attrs.evolve(
        StepRules(
            sizes=resolve_sizes(ranks=replicas * attn_tp, attn_dp_size=replicas),
            padding=make_padding("cost", {}),
            hidden_size=64,
            itemsize=4,
        ),
        **changes,
    )


def decode(tokens, **changes):
    return StepRecord(num_tokens=tokens, local_forward_mode=ForwardMode.DECODE, has_work=1, **changes)


def prefill(tokens, **changes):
    return StepRecord(
        num_tokens=tokens,
        local_forward_mode=ForwardMode.PREFILL,
        is_prefill_in_batch=1,
        decode_graph_vote=0,
        has_work=1,
        **changes,
    )


IDLE = StepRecord()
PREBUILT = StepRecord(local_forward_mode=ForwardMode.PREBUILT, has_work=1)


def test_golden_values_a5():
    plan = decide_step(
        [decode(5), IDLE, prefill(300), PREBUILT],
        rules(4, dispatch_modes=BOTH_PROTOCOLS, overlap=ALWAYS, captured_rows=(8, 16, 512)),
    )
    assert plan.live_tokens == (5, 0, 300, 0)
    assert plan.bucket is None and plan.graph_reason == "prefill"
    assert plan.forward_mode is ForwardMode.MIXED
    assert not plan.overlap and plan.overlap_reason == "modes_differ"
    assert [needs_idle_batch(plan, replica) for replica in range(4)] == [False, True, False, True]
    assert plan.padding_mode is PaddingMode.SUM_LEN
    assert plan.dispatch_mode is DispatchMode.NORMAL
    assert not plan.park


def test_a_graph_vote_of_no_makes_everybody_run_eager():
    plan = decide_step([decode(5), decode(5, decode_graph_vote=0)], rules(2, captured_rows=(8,)))
    assert plan.bucket is None and plan.graph_reason == "vote"


def test_every_replica_replays_the_smallest_bucket_that_takes_the_largest_aligned_count():
    plan = decide_step([decode(5), IDLE, decode(1), decode(2)], rules(4, attn_tp=2, captured_rows=(2, 4, 6, 8)))
    assert plan.bucket == 6
    assert plan.padded_tokens == (6, 6, 6, 6)
    assert plan.padding_mode is PaddingMode.MAX_LEN
    too_large = decide_step([decode(9), decode(1)], rules(2, captured_rows=(2, 8)))
    assert too_large.bucket is None and too_large.graph_reason == "too_large"


def test_small_steps_with_prompt_tokens_replay_a_bucket_of_their_own_in_one_micro_batch_with_the_protocol_of_graphs():
    captured = rules(
        4,
        attn_tp=2,
        dispatch_modes=BOTH_PROTOCOLS,
        overlap=ALWAYS,
        captured_rows=(2, 8),
        captured_prefill_rows=(16, 64),
        captured_pairs=17 * 100 + 144,
    )
    plan = decide_step([decode(5), IDLE, prefill(17, max_prefix_length=100), PREBUILT], captured)
    assert plan.bucket == 64 and plan.padded_tokens == (64,) * 4 and plan.padding_mode is PaddingMode.MAX_LEN
    assert plan.forward_mode is ForwardMode.MIXED and plan.dispatch_mode is DispatchMode.LOW_LATENCY
    assert not plan.overlap and plan.overlap_reason == "not_captured"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (prefill(65), "prefill_too_large"),
        (prefill(8, prefill_graph_vote=0), "prefill_vote"),
        (prefill(64, max_prefix_length=69), "prefill_context"),
    ],
)
def test_steps_with_prompt_tokens_run_eager_beyond_rows_votes_and_contexts(record, reason):
    both = rules(2, dispatch_modes=BOTH_PROTOCOLS, captured_rows=(2, 8), captured_prefill_rows=(16, 64))
    both = attrs.evolve(both, captured_pairs=64 * 68 + 2048)
    plan = decide_step([decode(2), record], both)
    assert plan.bucket is None and plan.graph_reason == reason
    assert plan.dispatch_mode is DispatchMode.NORMAL


def test_decode_steps_take_the_low_latency_protocol_of_a_dispatcher_that_has_both():
    assert decide_step([decode(1), IDLE], rules(2, dispatch_modes=BOTH_PROTOCOLS)).dispatch_mode is (
        DispatchMode.LOW_LATENCY
    )
    assert decide_step([decode(1), IDLE], rules(2)).dispatch_mode is DispatchMode.NORMAL


def test_an_idle_replica_reports_zero_tokens_and_joins_the_step():
    plan = decide_step([decode(4), IDLE], rules(2))
    assert plan.live_tokens == (4, 0)
    assert needs_idle_batch(plan, 1) and not needs_idle_batch(plan, 0)
    assert plan.forward_mode is ForwardMode.DECODE


def test_ranks_park_only_when_nobody_holds_work():
    assert decide_step([IDLE, IDLE], rules(2)).park
    waiting = StepRecord(has_work=1)
    assert not decide_step([IDLE, waiting], rules(2)).park
    assert not decide_step([IDLE, decode(1)], rules(2)).park


def test_rows_are_aligned_to_attention_tp_before_the_padding_mode_is_chosen():
    plan = decide_step([decode(5), decode(3), IDLE, decode(8)], rules(4, attn_tp=2))
    assert plan.padding_mode is PaddingMode.MAX_LEN
    assert plan.padded_tokens == (8, 8, 8, 8)
    assert plan.buffer_rows == 32
    one_row = decide_step([decode(1), decode(1)], rules(2, attn_tp=2))
    assert one_row.padded_tokens == (2, 2)


def test_overlap_needs_every_vote_and_one_mode():
    both = rules(2, overlap=ALWAYS)
    voted = decide_step([decode(8, overlap_rows=4), decode(2, overlap_rows=1)], both)
    assert voted.overlap and voted.overlap_rows == (4, 1)
    assert decide_step([decode(8), decode(1, local_can_run_overlap=0)], both).overlap_reason == "vote"
    assert decide_step([decode(8), prefill(8)], both).overlap_reason == "modes_differ"
    assert decide_step([IDLE, IDLE], both).overlap_reason == "all_idle"
    assert decide_step([decode(8), decode(8)], rules(2)).overlap_reason == "off"
    assert decide_step([decode(8, overlap_rows=4), IDLE], both).overlap


@pytest.mark.parametrize("field", ["step", "eplb_pass"])
def test_replicas_at_different_steps_or_passes_are_named(field):
    records = [decode(1, **{field: 17}), decode(1, **{field: 16}), decode(1, **{field: 17})]
    with pytest.raises(AgreementError, match=rf"about {field}: replica 1 at 16, the others at 17") as error:
        decide_step(records, rules(3))
    assert error.value.odd_ranks == (1,) and error.value.field == field


RECORDS = st.builds(
    StepRecord,
    num_tokens=st.integers(0, 9),
    decode_graph_vote=st.integers(0, 1),
    is_prefill_in_batch=st.integers(0, 1),
    local_can_run_overlap=st.integers(0, 1),
    local_forward_mode=st.sampled_from([1, 2, 3, 4]),
    has_work=st.integers(0, 1),
)


@given(st.lists(RECORDS, min_size=1, max_size=4), st.integers(1, 3), st.booleans())
def test_every_plan_holds_all_rows_in_aligned_slots(records, attn_tp, captured):
    sizes = tuple(rows * attn_tp for rows in (2, 6)) if captured else ()
    plan = decide_step(records, rules(len(records), attn_tp, captured_rows=sizes))
    assert all(rows % attn_tp == 0 for rows in plan.padded_tokens)
    assert all(rows >= live for rows, live in zip(plan.padded_tokens, plan.live_tokens, strict=True))
    if plan.padding_mode is PaddingMode.MAX_LEN:
        assert len(set(plan.padded_tokens)) == 1
