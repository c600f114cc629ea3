"""``crossdock bench``: each sub-command on a CPU, its fields, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from crossdock.cli.main import main

SMALL_MODEL = ["--dtype", "float32", "--num-iters", "2", "--num-iters-warmup", "1"]
SMALL_LAYER = [
    "--hidden-size",
    "64",
    "--num-experts",
    "8",
    "--top-k",
    "2",
    "--num-iters",
    "2",
    "--num-iters-warmup",
    "1",
]


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """The JSON that a command prints, and nothing else on standard output."""
    code = main(["bench", *words])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return json.loads(printed.out)


def test_latency_prints_the_fields_of_peers(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, "latency", *SMALL_MODEL, "--batch-size", "2", "--input-len", "5", "--output-len", "3")
    assert len(found["latencies"]) == 2
    assert found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 2)
    assert set(found["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert 0 < found["avg_first_token_latency"] < found["avg_latency"]
    assert (found["batch_size"], found["input_len"], found["output_len"]) == (2, 5, 3)


def test_throughput_counts_every_token_once(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, "throughput", *SMALL_MODEL, "--num-prompts", "3", "--input-len", "4", "--output-len", "5")
    assert found["num_requests"] == 3
    assert found["total_num_tokens"] == 3 * (4 + 5)
    assert found["requests_per_second"] * found["elapsed_time"] == pytest.approx(3)
    assert found["tokens_per_second"] * found["elapsed_time"] == pytest.approx(27)
    assert found["output_tokens_per_second"] * found["elapsed_time"] == pytest.approx(15)


def test_throughput_of_two_replicas_is_that_of_all_requests(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(
        capsys, "throughput", *SMALL_MODEL, "--num-prompts", "3", "--input-len", "4", "--output-len", "2",
        "--ranks", "2", "--attn-dp", "2", "--dispatcher", "alltoallv",
    )  # fmt: skip
    assert found["ranks"] == 2
    assert found["total_num_tokens"] == 3 * (4 + 2)


@pytest.mark.parametrize("dispatcher", ["alltoallv", "allgatherv"])
def test_dispatch_times_each_way_on_two_ranks(dispatcher: str, tmp_path: Path) -> None:
    out = tmp_path / "dispatch.json"
    words = ["dispatch", *SMALL_LAYER, "--num-tokens", "1", "--num-tokens", "6", "--dispatcher", dispatcher]
    assert main(["bench", *words, "--ranks", "2", "--attn-dp", "2", "--out", str(out)]) == 0
    rows = json.loads(out.read_text(encoding="utf-8"))
    assert [row["num_tokens"] for row in rows] == [1, 6]
    for row in rows:
        assert (row["dispatcher"], row["ranks"], row["mode"]) == (dispatcher, 2, "normal")
        for way in ("dispatch", "combine"):
            assert 0 < row[f"min_{way}_us"] <= row[f"median_{way}_us"] <= row[f"p99_{way}_us"]


@pytest.mark.parametrize("weight_dtype", ["native", "fp8_block"])
def test_experts_are_timed_in_each_form_of_weights(weight_dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = bench(
        capsys, "experts", *SMALL_LAYER, "--intermediate-size", "32", "--num-tokens", "4", "--experts", "torch",
        "--dtype", "float32", "--weight-dtype", weight_dtype,
    )  # fmt: skip
    assert (row["experts"], row["weight_dtype"], row["num_tokens"]) == ("torch", weight_dtype, 4)
    assert row["min_experts_us"] > 0
    assert row["tflops"] >= 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["latency", "--batch-size", "0"], "--batch-size must be at least 1, found 0"),
        (["latency", "--input-len", "900000"], "but the context holds"),
        (["throughput", "--num-iters", "0"], "--num-iters must be at least 1"),
        (["dispatch", "--top-k", "99"], "--top-k 99 is more than --num-experts 32"),
        (["dispatch", "--num-experts", "9", "--ranks", "2"], "cannot be split over 2 ranks"),
        (["dispatch", "--num-tokens", "0"], "--num-tokens must be at least 1"),
        (["experts", "--top-k", "2"], "--experts torch"),
        (["dispatch", "--dispatcher", "depep"], "did you mean 'deepep'"),
        (["latency", "--out", "no/such/folder.json"], "does not exist"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_exit_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""
    assert printed.err.count("\n") == 1
