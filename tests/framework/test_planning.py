"""Windows, planner words and scores of offline planning."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from crossdock.errors import ConfigValueError
from crossdock.placement import balancedness, make_eplb_algo, placement_change, plan
from crossdock.planning import read_algo, read_topology, score_planner, windows
from crossdock.testing.expert_loads import LOADS
from crossdock.types.placement import ExpertLoad

TOPOLOGY = read_topology("40:8:2:4")
STEPS = LOADS["drift"]((5, 3, 32), 1)


def test_windows_are_sums_of_steps_and_a_shorter_rest_is_left_out() -> None:
    parts = windows(ExpertLoad(counts=STEPS), 2)
    assert len(parts) == 2
    assert np.array_equal(parts[1], STEPS[2] + STEPS[3])
    assert len(windows(ExpertLoad(counts=STEPS), 9)) == 1
    with pytest.raises(ConfigValueError, match="at least 1 step"):
        windows(ExpertLoad(counts=STEPS), 0)


def test_a_config_is_slots_gpus_nodes_groups() -> None:
    assert (TOPOLOGY.num_physical_experts, TOPOLOGY.num_gpus, TOPOLOGY.num_nodes, TOPOLOGY.num_groups) == (40, 8, 2, 4)
    assert read_topology("40:8").num_nodes == 1
    for wrong in ("40", "a:8", "40:8:1:1:1", "-40:8", "4²:8"):
        with pytest.raises(ConfigValueError, match="SLOTS:GPUS:NODES:GROUPS"):
            read_topology(wrong)


def test_planner_words_are_read_with_types() -> None:
    choice = read_algo("crossdock:effort=fast,max_moves=3", ["move_price=0.5"])
    assert choice.name == "crossdock"
    assert choice.options == {"effort": "fast", "max_moves": 3, "move_price": 0.5}
    with pytest.raises(ConfigValueError, match="expected key=value"):
        read_algo("crossdock:fast")


@pytest.mark.parametrize("chain", [False, True])
def test_a_score_is_what_planning_each_window_by_hand_gives(chain: bool) -> None:
    parts = windows(ExpertLoad(counts=STEPS), 1)
    score = score_planner(make_eplb_algo("crossdock", {}), TOPOLOGY, parts, chain=chain, repeat=1)
    current, made = None, []
    for part in parts[:-1]:
        made.append(plan("crossdock", part, TOPOLOGY, current))
        current = made[-1] if chain else None
    now = [balancedness(placement, part, TOPOLOGY) for placement, part in zip(made, parts[:-1], strict=True)]
    following = [balancedness(placement, part, TOPOLOGY) for placement, part in zip(made, parts[1:], strict=True)]
    moved = [placement_change(a, b, TOPOLOGY).moved.mean() for a, b in itertools.pairwise(made)]
    assert score.windows == 4
    assert (score.now_mean, score.now_worst) == (pytest.approx(np.mean(now)), pytest.approx(np.min(now)))
    assert (score.next_mean, score.next_worst) == (pytest.approx(np.mean(following)), pytest.approx(np.min(following)))
    assert score.moved_slots_mean == pytest.approx(np.mean(moved))
    assert 0 < score.ms_min <= score.ms_median
    assert score.now_mean <= score.bound_mean <= 1


def test_a_single_window_has_no_next_and_no_moves() -> None:
    score = score_planner(make_eplb_algo("global", {}), TOPOLOGY, [STEPS[0]], repeat=1)
    assert (score.windows, score.next_mean, score.next_worst, score.moved_slots_mean) == (1, None, None, None)


def test_a_history_gives_a_forecasting_planner_the_windows_before() -> None:
    parts = windows(ExpertLoad(counts=LOADS["topics"]((16, 3, 32), 2)), 1)
    algo = make_eplb_algo("crossdock", {"forecast": "ewma", "effort": "fast"})
    short, long = (score_planner(algo, TOPOLOGY, parts, history=n, repeat=1) for n in (1, 8))
    assert short.next_mean is not None and long.next_mean is not None
    assert long.next_mean > short.next_mean
