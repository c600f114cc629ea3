"""The load generator against the server on a fake engine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crossdock.errors import RuntimeFault
from crossdock.serving.bench_client import BenchLoad, RequestTimes, run_bench, server_facts, summary

RunServer = Callable[..., None]
LOAD = BenchLoad(num_prompts=6, input_tokens=5, output_tokens=7, vocab_size=300, max_concurrency=3)


def test_every_token_of_every_request_is_counted(run_server: RunServer, long_model: Path) -> None:
    async def scenario(server: Any) -> None:
        assert await server_facts(server.url) == ("tiny", 512)
        result = await run_bench(server.url, "tiny", LOAD)
        assert (result["completed"], result["failed"]) == (6, 0)
        assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 42)
        assert result["mean_ttft_ms"] <= result["mean_e2el_ms"]
        assert result["p99_itl_ms"] >= 0

    run_server(scenario, folder=long_model, num_replicas=2)


def test_tokens_without_text_are_timed_as_well(run_server: RunServer, long_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "silent"
    shutil.copytree(long_model, folder, ignore=shutil.ignore_patterns("tokenizer*"))

    async def scenario(server: Any) -> None:
        result = await run_bench(server.url, "tiny", LOAD)
        assert (result["completed"], result["total_output_tokens"]) == (6, 42)
        assert 0 < result["mean_ttft_ms"] < result["mean_e2el_ms"]
        assert result["mean_tpot_ms"] > 0

    run_server(scenario, folder=folder)


def test_a_server_that_refuses_everything_is_one_sentence(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        with pytest.raises(RuntimeFault, match=r"HTTP 400.*model"):
            await run_bench(server.url, "other", LOAD)

    run_server(scenario)


def test_latencies_follow_from_the_times_of_the_chunks() -> None:
    one = RequestTimes(begin_s=1.0, token_s=[1.5, 1.6, 1.9], end_s=2.0, input_tokens=4, output_tokens=3)
    lost = RequestTimes(begin_s=1.0, error="x")
    result = summary([one, lost], 2.0, LOAD)
    assert result["completed"] == 1
    assert result["mean_ttft_ms"] == pytest.approx(500)
    assert result["mean_tpot_ms"] == pytest.approx(200)
    assert result["mean_itl_ms"] == pytest.approx(200)
    assert result["mean_e2el_ms"] == pytest.approx(1000)
    assert result["output_throughput"] == pytest.approx(1.5)


def test_arrivals_have_the_rate_and_the_seed_decides() -> None:
    load = BenchLoad(num_prompts=2000, input_tokens=1, output_tokens=1, vocab_size=10, request_rate=50.0)
    assert load.arrivals_s()[-1] == pytest.approx(40, rel=0.1)
    assert load.arrivals_s() == load.arrivals_s()
    assert load.prompts() == load.prompts()
    assert {token for prompt in load.prompts() for token in prompt} == set(range(1, 10))
