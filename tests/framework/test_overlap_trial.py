"""A trial of two ways: how many passes it takes, and that noise, slow first passes and drift do not sway it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from crossdock.overlap_trial import CHECK_EVERY, FEWEST_PAIRS, LOOKS, MOST_PAIRS, PATIENCE, OverlapTrial
from crossdock.types.step import TrialWay

Passes = Callable[[int, bool], float]
"""Step number and whether it overlaps -> seconds."""


def run(trial: OverlapTrial, took: Passes, steps: int, exposed: float | None = 0.3) -> list[bool]:
    """Which of the steps overlapped, when every wish is met and the verdict is followed."""
    ways: list[bool] = []
    for step in range(steps):
        looks, way = trial.is_looking, trial.ask()
        overlaps = way is TrialWay.OVERLAPPED
        if way is TrialWay.NONE:
            overlaps = trial.gain_share is not None and trial.gain_share > 0
        else:
            trial.learn(took(step, overlaps), exposed if looks else None, is_overlapped=overlaps)
        ways.append(overlaps)
    return ways


def seconds(sequential: float, overlapped: float, noise: float = 0.0, seed: int = 0) -> Passes:
    drawn = random.Random(seed)
    return lambda step, overlaps: (overlapped if overlaps else sequential) * (1 + drawn.uniform(-noise, noise))


def test_a_clear_gain_takes_two_pairs_and_a_clear_loss_costs_two_overlapped_steps() -> None:
    for overlapped, is_on in ((0.8, True), (1.6, False)):
        trial = OverlapTrial()
        ways = run(trial, seconds(1.0, overlapped), LOOKS + 4)
        assert ways == [False] * LOOKS + [True, False, False, True]
        assert trial.gain_share == pytest.approx(1.0 - overlapped)
        assert run(trial, seconds(1.0, overlapped), 100) == [is_on] * 100


@pytest.mark.parametrize(("overlapped", "is_on"), [(0.97, True), (1.03, False)])
def test_three_per_cent_are_told_from_noise_of_two(overlapped: float, is_on: bool) -> None:
    """A gain of 1.03 was turned off, when the better one of two passes counted."""
    verdicts = []
    for seed in range(200):
        trial = OverlapTrial()
        run(trial, seconds(1.0, overlapped, noise=0.02, seed=seed), LOOKS + 2 * MOST_PAIRS)
        assert trial.gain_share is not None
        verdicts.append(trial.gain_share > 0)
    assert verdicts.count(is_on) >= 190


def test_a_loss_of_five_per_cent_is_seen_through_noise_of_ten() -> None:
    """As on a machine that others use, too; three pairs whose median pointed the other way were believed."""
    verdicts = []
    for seed in range(200):
        trial = OverlapTrial()
        run(trial, seconds(1.0, 1.05, noise=0.1, seed=seed), LOOKS + 2 * MOST_PAIRS)
        assert trial.gain_share is not None
        verdicts.append(trial.gain_share > 0)
    assert verdicts.count(False) >= 180


def test_what_cannot_be_told_from_noise_is_left_whole() -> None:
    for overlapped in (0.995, 1.0, 1.005):
        trial = OverlapTrial()
        ways = run(trial, seconds(1.0, overlapped, noise=0.001), 100)
        assert ways.count(True) == MOST_PAIRS
        assert not any(ways[LOOKS + 2 * MOST_PAIRS :])


def test_slow_first_passes_do_not_count() -> None:
    def took(step: int, overlaps: bool) -> float:
        is_first = step == 0 or step == LOOKS
        return (0.97 if overlaps else 1.0) + 50.0 * is_first

    trial = OverlapTrial()
    run(trial, took, LOOKS + 2 * FEWEST_PAIRS)
    assert trial.gain_share == pytest.approx(0.03)


def test_one_pass_that_was_held_up_changes_nothing() -> None:
    for held_up in range(LOOKS, LOOKS + 2 * MOST_PAIRS):

        def took(step: int, overlaps: bool, held_up: int = held_up) -> float:
            return (0.97 if overlaps else 1.0) + 0.5 * (step == held_up)

        trial = OverlapTrial()
        run(trial, took, LOOKS + 2 * MOST_PAIRS)
        assert trial.gain_share == pytest.approx(0.03)


def test_steps_that_take_longer_and_longer_are_compared_with_their_neighbours() -> None:
    trial = OverlapTrial()
    run(trial, lambda step, overlaps: (0.94 if overlaps else 1.0) * (1.0 + 0.03 * step), LOOKS + 2 * MOST_PAIRS)
    assert trial.gain_share is not None
    assert trial.gain_share > 0.05


@pytest.mark.parametrize("drift", [0.01, 0.03, 0.1])
@pytest.mark.parametrize("overlapped", [0.9, 1.03])
def test_steps_that_get_dearer_or_cheaper_give_the_verdict_of_steady_ones(overlapped: float, drift: float) -> None:
    """Chunks of a long prompt: each attends to more than the one before. Seen only in one order, the second pass of a pair pays for that."""
    for grows in (1.0 + drift, 1.0 / (1.0 + drift)):
        trial = OverlapTrial()
        run(trial, lambda step, overlaps, g=grows: (overlapped if overlaps else 1.0) * g**step, LOOKS + 2 * MOST_PAIRS)
        assert trial.gain_share is not None
        assert (trial.gain_share > 0) == (overlapped < 1.0), grows


def test_where_next_to_nothing_can_be_hidden_overlap_is_not_even_tried() -> None:
    trial = OverlapTrial()
    ways = run(trial, seconds(1.0, 1.2), CHECK_EVERY, exposed=0.01)
    assert not any(ways)
    assert trial.gain_share == pytest.approx(0.01 - 0.03 * 0.99)


def test_replayed_steps_show_no_operations_and_are_tried() -> None:
    trial = OverlapTrial()
    assert run(trial, seconds(1.0, 1.6), 20, exposed=None).count(True) == 2


def test_a_verdict_is_checked_by_one_pair_and_one_that_agrees_or_is_noise_lets_it_stand() -> None:
    for overlapped in (0.9, 1.005):
        trial = OverlapTrial()
        run(trial, seconds(1.0, 0.9), LOOKS + 4)
        ways = run(trial, seconds(1.0, overlapped), 2 * CHECK_EVERY)
        assert ways.count(False) == 1, "one sequential step of so many, beside one that overlaps anyway"
        assert trial.gain_share == pytest.approx(0.1)


def test_a_check_that_contradicts_opens_the_trial_again() -> None:
    for before, after in ((0.9, 1.2), (1.2, 0.9)):
        trial = OverlapTrial()
        run(trial, seconds(1.0, before), LOOKS + 4)
        ways = run(trial, seconds(1.0, after), CHECK_EVERY + 5)
        assert trial.gain_share == pytest.approx(1.0 - after)
        assert ways[-1] == (after < 1.0)


def test_passes_that_another_replica_asked_for_open_no_trial_again() -> None:
    trial = OverlapTrial()
    run(trial, seconds(1.0, 0.9), LOOKS + 4)
    for _ in range(10):
        trial.learn(3.0, None, is_overlapped=True)
        trial.learn(1.0, None, is_overlapped=False)
    assert trial.gain_share == pytest.approx(0.1)


def test_one_pair_that_was_held_up_flips_no_verdict() -> None:
    trial = OverlapTrial()
    run(trial, seconds(1.0, 0.9), LOOKS + 4)
    run(trial, seconds(1.0, 0.9), CHECK_EVERY - 1)
    run(trial, seconds(1.0, 3.0), 2)
    assert trial.gain_share is None
    run(trial, seconds(1.0, 0.9), 2 * MOST_PAIRS)
    assert trial.gain_share == pytest.approx(0.1)


@pytest.mark.parametrize("has_verdict", [False, True])
def test_a_trial_that_asks_in_vain_ends_and_asks_again_later(has_verdict: bool) -> None:
    """Every step runs sequentially, whatever is asked for: its graph was captured in one micro-batch, say."""
    trial = OverlapTrial()
    if has_verdict:
        run(trial, seconds(1.0, 0.9), LOOKS + 4)
    asked = []
    for _ in range(2 * (CHECK_EVERY + PATIENCE)):
        asked.append(trial.ask() is not TrialWay.NONE)
        if asked[-1]:
            trial.learn(1.0, None, is_overlapped=False)
    assert asked.count(True) <= LOOKS + 3 * (PATIENCE + 1)
    assert asked.count(True) > PATIENCE
    assert trial.gain_share == pytest.approx(0.1 if has_verdict else -0.01)


def test_passes_whose_operations_were_timed_are_not_compared_with_others() -> None:
    trial = OverlapTrial()
    run(trial, seconds(1.0, 0.9), LOOKS)
    for _ in range(20):
        trial.learn(5.0, 0.3, is_overlapped=True)
        trial.learn(1.0, None, is_overlapped=False)
    assert trial.gain_share is None
    for _ in range(2):
        trial.learn(0.9, 0.3, is_overlapped=True)
        trial.learn(1.0, 0.3, is_overlapped=False)
    assert trial.gain_share == pytest.approx(0.1)


@pytest.mark.parametrize(("overlapped", "exposed"), [(1.02, 0.2), (1.2, 0.2), (1.6, None), (1.1, 0.01)])
def test_being_off_costs_at_most_one_per_cent_of_a_thousand_steps(overlapped: float, exposed: float | None) -> None:
    for seed in range(20):
        trial, took = OverlapTrial(), seconds(1.0, overlapped, noise=0.01, seed=seed)
        ways = run(trial, took, 1000, exposed)
        total = sum(overlapped if overlaps else 1.0 for overlaps in ways)
        assert total <= 1.01 * len(ways)


def test_being_on_costs_at_most_one_per_cent_of_a_thousand_steps() -> None:
    for seed in range(20):
        ways = run(OverlapTrial(), seconds(1.0, 0.8, noise=0.01, seed=seed), 1000)
        total = sum(0.8 if overlaps else 1.0 for overlaps in ways)
        assert total <= 1.01 * 0.8 * len(ways)
