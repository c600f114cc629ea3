"""Overlap in the step loop: the tokens of one process, with the reasons in the receipt; the chrome_trace observer beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
import structlog
from crossdock.config import Config, ObserverConfig, PluginChoice
from crossdock.observe.span_shares import span_shares
from crossdock.observe.trace_files import read_trace
from crossdock.offline import generate, new_tokens, offline_job
from crossdock.testing.engine_ranks import run_on_pool
from crossdock.testing.random_models import random_model_config, write_random_model
from crossdock.testing.world import RankPool
from crossdock.types.request import SamplingParams

PROMPTS = [[(7 * place + 3 * index) % 96 for place in range(length)] for index, length in enumerate((5, 1, 23, 9, 2))]
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), "deepseek_v3")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


def overlapping(folder: Path, strategy: str, **options: object) -> Config:
    config = random_model_config(folder, ranks=2, attn_dp=2, dispatcher="alltoallv", chunk_tokens=7)
    return attrs.evolve(config, strategy=PluginChoice(name=strategy, options=options))


@pytest.mark.parametrize("strategy", ["two_batch", "two_batch_mixed"])
def test_overlapped_ranks_generate_the_tokens_of_one_process(
    folder: Path, rank_pool: Callable[[int], RankPool], tmp_path: Path, strategy: str
) -> None:
    expected = [new_tokens(outputs) for outputs in generate(folder, PROMPTS, GREEDY, random_model_config(folder))]
    config = overlapping(folder, strategy, gate="always")
    observed = ObserverConfig(names=("chrome_trace",), options={"chrome_trace": {"folder": str(tmp_path)}})
    job = offline_job(folder, PROMPTS, GREEDY, attrs.evolve(config, observer=observed))
    result = run_on_pool(rank_pool(2), job)
    assert [new_tokens(result.outputs[str(index)]) for index in range(len(PROMPTS))] == expected
    counts = result.receipt["counts"]["overlap"]
    assert counts["on"] > 3
    assert sum(counts["reasons"].values()) == counts["off"]
    assert ("modes_differ" in counts["reasons"]) == (strategy == "two_batch")
    for rank in (0, 1):
        spans = read_trace(tmp_path / f"crossdock_rank{rank}.trace.json")[rank]
        assert 0 in {span.step for span in spans}
        assert span_shares(spans).in_flight_us > 0


def test_small_steps_run_as_one_with_the_reason_in_the_receipt(
    folder: Path, rank_pool: Callable[[int], RankPool]
) -> None:
    job = offline_job(folder, PROMPTS, GREEDY, overlapping(folder, "two_batch"))
    counts = run_on_pool(rank_pool(2), job).receipt["counts"]["overlap"]
    assert counts["on"] == 0
    assert counts["reasons"]["too_small"] > 0


@pytest.mark.parametrize("depth", ["0", "1"])
def test_gated_steps_take_turns_until_both_ways_are_known_at_either_depth(
    folder: Path, rank_pool: Callable[[int], RankPool], depth: str
) -> None:
    """At depth 1 a pass ends after the next one was launched."""
    sampling = attrs.evolve(GREEDY, max_new_tokens=14)
    expected = [new_tokens(outputs) for outputs in generate(folder, PROMPTS, sampling, random_model_config(folder))]
    config = overlapping(folder, "two_batch", min_prefill_rows=2, min_decode_rows=2)
    config = attrs.evolve(config, scheduler=attrs.evolve(config.scheduler, depth=depth))
    result = run_on_pool(rank_pool(2), offline_job(folder, PROMPTS, sampling, config))
    assert [new_tokens(result.outputs[str(index)]) for index in range(len(PROMPTS))] == expected
    counts = result.receipt["counts"]["overlap"]
    assert counts["on"] > 0
    assert counts["reasons"]["probe"] > 0


def test_a_dispatcher_that_sends_nothing_is_not_split(folder: Path, rank_pool: Callable[[int], RankPool]) -> None:
    config = overlapping(folder, "two_batch", min_prefill_rows=0, min_decode_rows=0)
    config = attrs.evolve(config, dispatcher=PluginChoice(name="allgatherv"))
    job = offline_job(folder, PROMPTS, GREEDY, config)
    counts = run_on_pool(rank_pool(2), job).receipt["counts"]["overlap"]
    assert counts["on"] == 0
    assert counts["reasons"]["nothing_to_hide"] > 0
