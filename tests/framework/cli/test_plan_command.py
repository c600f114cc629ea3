"""``crossdock plan``, ``plan diff`` and ``bench plan`` as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crossdock.cli.main import main
from crossdock.placement import balancedness, plan
from crossdock.placement_io.placement_files import read_placement
from crossdock.testing.expert_loads import LOADS
from crossdock.types.placement import Topology

STEPS = LOADS["drift"]((6, 3, 32), 1)
SIZES = ("--gpus", "8", "--nodes", "2", "--slots", "40")
TOPOLOGY = Topology(num_gpus=8, num_nodes=2, num_physical_experts=40)
BENCH_KEYS = {
    "trace", "algo", "config", "windows", "ms_median", "ms_min", "now_mean", "now_worst",
    "next_mean", "next_worst", "moved_slots_mean", "bound_mean",
}  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.npz"
    np.savez(path, load=STEPS.astype(np.int32))
    return str(path)


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(list(words)) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_writes_what_it_reports(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    report = _json(capsys, "plan", trace, *SIZES, "--algo", "crossdock", "--out", str(out), "--json")
    placement = read_placement(out)
    assert set(json.loads(out.read_text())) >= {
        "physical_to_logical_map", "logical_to_physical_map", "replica_counts", "algo", "config",
    }  # fmt: skip
    assert report["now"] == balancedness(placement, STEPS[0], TOPOLOGY).tolist()
    assert report["next"] == balancedness(placement, STEPS[1], TOPOLOGY).tolist()
    assert np.array_equal(placement.physical_to_logical, plan("crossdock", STEPS[0], TOPOLOGY).physical_to_logical)


def test_plan_prints_layers_means_moves_bytes_and_gain(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", trace, *SIZES, "--window", "2", "--at", "1", "--expert-bytes", "1048576"]) == 0
    text = capsys.readouterr().out
    assert len([line for line in text.splitlines() if line.split()[0].isdigit()]) == 3
    for words in ("balancedness on window 1 of 3", "on the following window", "slots moved", "MiB", "predicted gain"):
        assert words in text


def test_plan_from_a_current_placement_keeps_its_limit_and_says_so_in_bytes(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    current = tmp_path / "current.pt"
    assert main(["plan", trace, *SIZES, "--out", str(current), "--format", "sglang"]) == 0
    capsys.readouterr()
    words = ("plan", trace, *SIZES, "--at", "4", "--current", str(current), "--option", "max_moves=2")
    report = _json(capsys, *words, "--expert-bytes", "10", "--json")
    assert max(report["moved_slots"]) <= 2
    assert report["from"] == "current"
    assert sum(report["bytes"].values()) == 10 * sum(report["moves"].values()) == 10 * sum(report["moved_slots"])
    assert report["now_mean"] > report["before_mean"]
    assert 0 < report["predicted_gain"] < 1


def test_diff_counts_moves_by_layer(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / f"plan{at}.json") for at in (0, 1)]
    for at, path in enumerate(paths):
        assert main(["plan", trace, *SIZES, "--at", str(at), "--out", path]) == 0
    capsys.readouterr()
    same = _json(capsys, "plan", "diff", paths[0], paths[0], "--gpus", "8", "--json")
    assert sum(same["moved_slots"]) == 0
    other = _json(capsys, "plan", "diff", *paths, "--gpus", "8", "--nodes", "2", "--expert-bytes", "3", "--json")
    assert sum(other["moved_slots"]) > 0
    assert other["bytes"]["cross_node"] == 3 * other["moves"]["cross_node"]
    assert main(["plan", "diff", *paths, "--gpus", "8"]) == 0
    assert "slots moved" in capsys.readouterr().out


def test_one_list_stands_for_all_layers_on_either_side_of_a_diff(capsys: pytest.CaptureFixture[str]) -> None:
    one, all_layers = "[0, 1, 2, 3]", "[[2, 1, 0, 3], [0, 1, 2, 3]]"
    for old, new in ((one, all_layers), (all_layers, one)):
        assert _json(capsys, "plan", "diff", old, new, "--gpus", "2", "--json")["moved_slots"] == [2, 0]


@pytest.mark.parametrize(
    ("new", "gpus", "sentence"),
    [
        ("[[0, 1, 2, 3, 0, 1]]", "2", "OLD has 1 layers of 4 slots and 4 experts and NEW 1 layers of 6 slots"),
        ("[[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]", "2", "3 layers"),
        ("[[0, 1, 2, 0]]", "2", "expert"),
        ("[[1, 0, 2, 3]]", "3", "3"),
        ("[[1, 0, 2, 3]]", "0", "gpus"),
    ],
)
def test_placements_that_cannot_be_compared_are_wrong_input(
    new: str, gpus: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    old = "[[0, 1, 2, 3], [0, 1, 2, 3]]" if new.count("[") > 2 else "[[0, 1, 2, 3]]"
    assert main(["plan", "diff", old, new, "--gpus", gpus]) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert told.count("\n") == 1


def test_bench_plan_prints_a_row_for_each_trace_config_and_planner(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    words = ("bench", "plan", "--trace", trace, "--config", "40:8:2:4", "--config", "36:6", "--algo", "global")
    rows = _json(capsys, *words, "--algo", "crossdock:effort=fast", "--window", "2", "--repeat", "1", "--out", str(out))
    assert [(row["config"], row["algo"]) for row in rows] == [
        ("40:8:2:4", "global"), ("40:8:2:4", "crossdock:effort=fast"), ("36:6", "global"), ("36:6", "crossdock:effort=fast"),
    ]  # fmt: skip
    assert all(set(row) == BENCH_KEYS and row["windows"] == 2 for row in rows)
    assert json.loads(out.read_text()) == rows


def test_chained_plans_of_bench_move_less(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("bench", "plan", "--trace", trace, "--config", "40:8", "--repeat", "1")
    apart, chained = _json(capsys, *words)[0], _json(capsys, *words, "--chain")[0]
    assert chained["moved_slots_mean"] < apart["moved_slots_mean"] / 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "8", "--slots", "41"), "41 slots do not divide over 8 GPUs; take 48 slots"),
        (("--gpus", "8", "--slots", "24"), "24 slots on 8 living GPUs are fewer than 32 experts; take 32 slots"),
        ((*SIZES, "--algo", "crosdock"), "did you mean 'crossdock'"),
        ((*SIZES, "--option", "effort=fats"), "did you mean 'fast'"),
        ((*SIZES, "--at", "6"), "there are 6 windows"),
        ((*SIZES, "--window", "0"), "at least 1 step"),
        ((*SIZES, "--history", "0"), "--history: must be at least 1, found 0"),
        ((*SIZES, "--expert-bytes", "-1"), "--expert-bytes: must be at least 0, found -1"),
        ((*SIZES, "--current", "none.json"), "none.json: no such file"),
        (
            (*SIZES, "--current", str([[*range(32), *range(16)]] * 3)),
            "--current has 48 slots a layer and --slots is 40",
        ),
        ((*SIZES, "--current", str([[*range(32), *range(8)]])), "--current has 1 layers and the load"),
        ((*SIZES, "--out", "plan.txt"), "format crossdock is written to .json"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_two(
    trace: str, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", trace, *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("words", [("--history", "0"), ("--repeat", "0"), ("--max-windows", "0")])
def test_bench_with_nothing_to_do_is_refused(
    trace: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "plan", "--trace", trace, "--config", "40:8", *words]) == 2
    assert f"{words[0]}: must be at least 1, found 0" in capsys.readouterr().err
