"""Whether a step overlaps: every reason, from records alone."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import attrs
import pytest
from crossdock import overlap_decision, step
from crossdock.overlap_decision import OverlapRules, decide_overlap
from crossdock.types.step import DispatchMode, ForwardMode, StepRecord, TrialWay
from crossdock.types.strategy import OverlapLimits
from hypothesis import given
from hypothesis import strategies as st

RULES = OverlapRules(limits=OverlapLimits(min_prefill_rows=8, min_decode_rows=4))
MIXING = OverlapRules(limits=attrs.evolve(RULES.limits, mixes_modes=True))
ALWAYS = OverlapRules(limits=attrs.evolve(RULES.limits, is_gated=False), has_communication=False)
IDLE = StepRecord(step=1)


def decode(rows: int, step: int = 1, **changes: int) -> StepRecord:
    return StepRecord(num_tokens=rows, local_forward_mode=ForwardMode.DECODE, step=step, **changes)


def prefill(rows: int, **changes: int) -> StepRecord:
    return StepRecord(num_tokens=rows, local_forward_mode=ForwardMode.PREFILL, step=1, **changes)


def decided(*records: StepRecord, rules: OverlapRules | None = RULES, mode: DispatchMode = DispatchMode.NORMAL) -> str:
    overlaps, reason = decide_overlap(records, mode, rules)
    assert overlaps == (reason == "")
    return reason


def test_a_strategy_with_one_micro_batch_never_overlaps() -> None:
    assert decided(decode(64), rules=None) == "off"


def test_replicas_without_rows_alone_do_not_overlap_and_beside_others_do() -> None:
    assert decided(IDLE, IDLE) == "all_idle"
    assert decided(decode(4, overlap_gain_us=1), IDLE) == ""


def test_one_vote_against_it_is_enough() -> None:
    assert decided(decode(9), decode(1, local_can_run_overlap=0)) == "vote"
    assert decided(decode(9), decode(1, local_can_run_overlap=0), rules=ALWAYS) == "vote"


def test_different_modes_overlap_only_under_a_strategy_that_mixes_them() -> None:
    assert decided(decode(9), prefill(9)) == "modes_differ"
    assert decided(decode(9, overlap_gain_us=1), prefill(9, overlap_gain_us=1), rules=MIXING) == ""


def test_prompt_rows_do_not_overlap_in_the_low_latency_protocol() -> None:
    for rules in (RULES, MIXING, ALWAYS):
        assert decided(prefill(9), prefill(9), rules=rules, mode=DispatchMode.LOW_LATENCY) == "low_latency_prefill"
    assert decided(decode(9), decode(9), rules=ALWAYS, mode=DispatchMode.LOW_LATENCY) == ""


def test_the_largest_replica_decides_whether_a_step_is_too_small() -> None:
    assert decided(decode(3), decode(3)) == "too_small"
    assert decided(decode(4, overlap_gain_us=1), decode(1)) == ""
    assert decided(prefill(7)) == "too_small"
    assert decided(prefill(7), rules=ALWAYS) == ""


def test_a_dispatcher_that_sends_nothing_leaves_nothing_to_hide() -> None:
    assert decided(decode(9), rules=attrs.evolve(RULES, has_communication=False)) == "nothing_to_hide"


def test_a_predicted_loss_turns_it_off_and_the_sum_over_replicas_counts() -> None:
    assert decided(decode(9, overlap_gain_us=-5), decode(9, overlap_gain_us=4)) == "no_gain"
    assert decided(decode(9, overlap_gain_us=-5), decode(9, overlap_gain_us=6)) == ""
    assert decided(decode(9, overlap_gain_us=-5), rules=ALWAYS) == ""


def test_only_the_largest_replicas_are_asked_for_the_gain() -> None:
    assert decided(decode(9, overlap_gain_us=5), decode(8, overlap_gain_us=-50)) == ""
    assert decided(decode(9, overlap_gain_us=-5), decode(8, overlap_gain_us=50)) == "no_gain"


def test_a_replica_that_measures_gets_the_way_it_asks_for_if_the_step_may_overlap_at_all() -> None:
    assert decided(decode(9, overlap_gain_us=-5, overlap_trial=TrialWay.OVERLAPPED), IDLE) == ""
    assert decided(decode(9, overlap_gain_us=5, overlap_trial=TrialWay.SEQUENTIAL), IDLE) == "probe"
    for way in TrialWay:
        assert decided(decode(3, overlap_trial=way)) == "too_small"
        assert decided(decode(9, overlap_trial=way), prefill(9)) == "modes_differ"
        assert decided(decode(9, overlap_trial=way), rules=ALWAYS) == ""


def test_of_replicas_that_measure_only_the_largest_are_heard_and_two_ways_are_one_overlapped_step() -> None:
    sequential, overlapped = (decode(9, overlap_trial=way) for way in (TrialWay.SEQUENTIAL, TrialWay.OVERLAPPED))
    assert decided(sequential, decode(8, overlap_trial=TrialWay.OVERLAPPED)) == "probe"
    assert decided(sequential, overlapped) == decided(overlapped, sequential) == ""


def test_a_replayed_step_overlaps_only_in_sizes_that_were_captured_so() -> None:
    rules = attrs.evolve(ALWAYS, captured_rows=(16, 32))
    assert decide_overlap([decode(9)], DispatchMode.NORMAL, rules, 16) == (True, "")
    assert decide_overlap([decode(9)], DispatchMode.NORMAL, rules, 64) == (False, "not_captured")
    assert decide_overlap([decode(9)], DispatchMode.NORMAL, rules, None) == (True, "")
    gated = attrs.evolve(RULES, captured_rows=(16,))
    assert decide_overlap([decode(3)], DispatchMode.NORMAL, gated, 4) == (False, "too_small")


@pytest.mark.parametrize("counts", [(1, 1), (1, 0), (2, 0), (2, 1), (8, 1)])
@given(gains=st.lists(st.integers(-9, 9), min_size=2, max_size=2), votes=st.tuples(st.booleans(), st.booleans()))
def test_every_rank_decides_the_same_from_the_same_records(
    counts: tuple[int, int], gains: list[int], votes: tuple[bool, bool]
) -> None:
    records = [
        decode(rows, overlap_gain_us=gain, local_can_run_overlap=int(vote)) if rows else IDLE
        for rows, gain, vote in zip(counts, gains, votes, strict=True)
    ]
    assert len({decided(*records, rules=rules) for rules in (RULES, attrs.evolve(RULES))}) == 1


def test_every_reason_is_explained_in_the_documentation() -> None:
    given = {
        reason
        for module in (overlap_decision, step)
        for reason in re.findall(r'False, "(\w+)"', inspect.getsource(module))
    }
    page = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text(encoding="utf-8")
    table = page.partition("| reason | |")[2].partition("\n\n")[0]
    assert given == set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))
    assert len(given) == 10
