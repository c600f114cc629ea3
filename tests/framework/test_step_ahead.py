"""Depth 1: a step is launched before the tokens of the one before it are known, and nothing that comes out changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
import structlog
from crossdock.config import Config
from crossdock.offline import new_tokens, offline_job
from crossdock.offline_job import OfflineResult, run_job_on_rank
from crossdock.rank_plan import plan_rank
from crossdock.testing.engine_ranks import run_on_pool
from crossdock.testing.random_models import random_model_config, write_random_model
from crossdock.testing.world import RankPool
from crossdock.types.request import EngineOutput, SamplingParams

VOCAB = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2, vocab_size=VOCAB)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


def mixed_requests(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, some with a common beginning, and every kind of sampling."""
    draw = random.Random(seed)
    common = [draw.randrange(VOCAB) for _ in range(9)]
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.8, "seed": draw.randrange(100)},
        {"temperature": 1.2, "top_p": 0.8, "seed": draw.randrange(100), "logprobs": 0},
        {"temperature": 1.0, "top_k": 5, "seed": draw.randrange(100)},
        {"temperature": 0.0, "stop_token_ids": tuple(draw.sample(range(VOCAB), 12))},
        {"temperature": 0.0, "prompt_logprobs": 1},
        {"temperature": 0.0, "min_new_tokens": 3, "stop_token_ids": tuple(draw.sample(range(VOCAB), 20))},
        {"temperature": 0.0, "logit_bias": ((3, 4.0),)},
    ]
    prompts: list[list[int]] = []
    sampling: list[SamplingParams] = []
    for number in range(14):
        own = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 12))]
        prompts.append(common + own if draw.random() < 0.5 else own)
        values = kinds[number % len(kinds)]
        sampling.append(SamplingParams(max_new_tokens=draw.randint(1, 12), **values))  # type: ignore[arg-type]
    return prompts, sampling


def config_of(folder: Path, depth: str, **layout: object) -> Config:
    config = random_model_config(
        folder,
        max_running_requests=5,
        max_step_tokens=16,
        chunk_tokens=6,
        kv_tokens=96,
        **layout,  # type: ignore[arg-type]
    )
    return attrs.evolve(config, scheduler=attrs.evolve(config.scheduler, depth=depth))


def stripped(outputs: list[EngineOutput]) -> tuple[object, ...]:
    """What a client sees, without the clock and without how often it was sent."""
    first = outputs[0]
    return (
        new_tokens(outputs),
        outputs[-1].finish_reason,
        tuple(entry.token_id for output in outputs for entry in output.logprobs),
        tuple(entry and entry.token_id for entry in first.prompt_logprobs),
    )


def outcome(result: OfflineResult) -> list[tuple[object, ...]]:
    return [stripped(outputs) for outputs in result.ordered_outputs()]


def run_alone(config: Config, seed: int) -> OfflineResult:
    prompts, sampling = mixed_requests(seed)
    job = offline_job(config.checkpoint.path, prompts, sampling, config)
    return run_job_on_rank(job, plan_rank(job.config, 0))


@pytest.mark.parametrize("seed", range(4))
def test_one_rank_gives_the_same_tokens_reasons_and_scores_at_either_depth(folder: Path, seed: int) -> None:
    plain, ahead = (run_alone(config_of(folder, depth), seed) for depth in ("0", "1"))
    assert outcome(plain) == outcome(ahead)


def test_requests_with_penalties_are_right_although_others_run_ahead(folder: Path) -> None:
    prompts = [[1, 2, 3], [4, 5], [6]]
    sampling = [
        SamplingParams(max_new_tokens=10, temperature=0.0, repetition_penalty=1.5),
        SamplingParams(max_new_tokens=4, temperature=0.0),
        SamplingParams(max_new_tokens=12, temperature=0.9, frequency_penalty=0.7, seed=3),
    ]
    results: list[list[tuple[object, ...]]] = []
    for depth in ("0", "1"):
        job = offline_job(folder, prompts, sampling, config_of(folder, depth))
        results.append(outcome(run_job_on_rank(job, plan_rank(job.config, 0))))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "layout",
    [
        {"ranks": 2, "attn_dp": 2, "dispatcher": "alltoallv"},
        {"ranks": 2, "attn_dp": 1},
        {"ranks": 4, "attn_dp": 2},
    ],
)
def test_ranks_stay_in_lockstep_and_peers_continue_with_their_leaders_tokens(
    folder: Path, layout: dict[str, object], rank_pool: Callable[[int], RankPool]
) -> None:
    prompts, sampling = mixed_requests(7)
    results: list[list[tuple[object, ...]]] = []
    for depth in ("0", "1"):
        job = offline_job(folder, prompts, sampling, config_of(folder, depth, **layout))
        results.append(outcome(run_on_pool(rank_pool(int(str(layout["ranks"]))), job, timeout_s=60)))
    assert results[0] == results[1]
