"""Greedy tokens of mixed batches are those of each request alone, and those that transformers' own class would choose."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
import structlog
from crossdock.config import CheckpointConfig, Config
from crossdock.offline import generate, new_tokens, offline_job
from crossdock.testing.engine_ranks import run_on_pool
from crossdock.testing.greedy_oracle import GreedyOracle
from crossdock.testing.random_models import random_model_config
from crossdock.testing.tiny_models import FAMILIES, save_tiny_model
from crossdock.testing.world import RankPool
from crossdock.types.request import SamplingParams

GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)
_RANDOM = random.Random(3)
PROMPTS = [[_RANDOM.randrange(96) for _ in range(1 + (11 * index) % 29)] for index in range(24)]
MOST_EXCLUDED = 0.02


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("greedy") / request.param, request.param)


def stored(config: Config) -> Config:
    """The configuration of a random model, reading the weights of the folder instead."""
    return attrs.evolve(config, checkpoint=CheckpointConfig(path=config.checkpoint.path))


def excluded_positions(oracle: GreedyOracle, mixed: list[list[int]], alone: list[list[int]]) -> int:
    """Checks every certain position; returns how many are not.

    The oracle follows the mixed answer, so a position after an uncertain one is checked too. From a difference to the lone answer
    on, which must begin at an uncertain position, both are different texts and nothing is left to compare.
    """
    excluded = 0
    for prompt, ours, theirs in zip(PROMPTS, mixed, alone, strict=True):
        choices = oracle.choices([*prompt, *ours])
        certain = [choices.is_certain(len(prompt) - 1 + place) for place in range(len(ours))]
        best = choices.best[len(prompt) - 1 : -1].tolist()
        wrong = [place for place, sure in enumerate(certain) if sure and ours[place] != best[place]]
        assert wrong == [], f"tokens {wrong} of prompt {prompt} are not the oracle's"
        differs = next((place for place, token in enumerate(ours) if token != theirs[place]), len(ours))
        assert differs == len(ours) or not certain[differs], f"token {differs} of prompt {prompt} depends on the batch"
        excluded += sum(not sure or place >= differs for place, sure in enumerate(certain))
    return excluded


def check_share(excluded: int, what: str) -> None:
    total = len(PROMPTS) * GREEDY.max_new_tokens
    print(f"{what}: {excluded} of {total} positions excluded for small margins")
    assert excluded <= MOST_EXCLUDED * total


def test_greedy_tokens_of_mixed_batches_are_those_of_requests_alone_and_of_the_oracle(folder: Path) -> None:
    config = stored(random_model_config(folder, max_running_requests=6, max_step_tokens=20, chunk_tokens=7))
    mixed = [new_tokens(outputs) for outputs in generate(folder, PROMPTS, GREEDY, config)]
    one_by_one = stored(random_model_config(folder, max_running_requests=1, prefix_cache=False))
    alone = [new_tokens(outputs) for outputs in generate(folder, PROMPTS, GREEDY, one_by_one)]
    check_share(excluded_positions(GreedyOracle(folder), mixed, alone), folder.name)


@pytest.mark.parametrize("dispatcher", ["allgatherv", "alltoallv"])
def test_greedy_tokens_on_two_replicas_are_those_of_requests_alone_and_of_the_oracle(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, dispatcher: str
) -> None:
    folder = save_tiny_model(tmp_path / "deepseek_v3", "deepseek_v3")
    spread = random_model_config(
        folder,
        ranks=2,
        attn_dp=2,
        dispatcher=dispatcher,
        max_running_requests=4,
        max_step_tokens=16,
        chunk_tokens=5,
        kv_tokens=120,
    )
    result = run_on_pool(rank_pool(2), offline_job(folder, PROMPTS, GREEDY, stored(spread)))
    mixed = [new_tokens(result.outputs[str(index)]) for index in range(len(PROMPTS))]
    one_by_one = stored(random_model_config(folder, max_running_requests=1, prefix_cache=False))
    alone = [new_tokens(outputs) for outputs in generate(folder, PROMPTS, GREEDY, one_by_one)]
    check_share(excluded_positions(GreedyOracle(folder), mixed, alone), f"{dispatcher} on two replicas")
