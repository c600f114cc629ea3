"""Strategies on two GPUs, with transfers and shared experts in streams of their own: the logits of sequential."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from crossdock.config import Config, LaunchConfig, PluginChoice
from crossdock.offline import logits_job, new_tokens, offline_job
from crossdock.testing.engine_ranks import run_on_pool
from crossdock.testing.random_models import random_model_config, write_random_model
from crossdock.testing.world import RankPool
from crossdock.types.request import SamplingParams

LENGTHS = (10, 900, 20, 30, 1, 257, 64, 300, 128, 5)
LIKE_LENGTHS = tuple(range(20, 40, 2))
"""Spread evenly over the replicas: a replica that generates for one prompt cannot be cut in two, and then none overlaps."""


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    return [[(7 * place + 3 * index) % 96 for place in range(length)] for index, length in enumerate(lengths)]


PROMPTS = prompts(LENGTHS)
TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2}
"""Relative to the largest logit: half as many rows take other tiles, which add up in another order."""
GREEDY = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
TRANSPORTS = [("alltoallv", "float32"), ("nvlink", "bfloat16")]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, device="cuda") as gpus:
        yield gpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "max_position_embeddings": 1024}
    return write_random_model(tmp_path_factory.mktemp("model"), "deepseek_v3", **sizes)


def config_of(folder: Path, dispatcher: str, dtype: str, strategy: str) -> Config:
    config = random_model_config(
        folder, ranks=2, attn_dp=2, dispatcher=dispatcher, kv_tokens=8192, max_step_tokens=2048, chunk_tokens=512
    )
    options = {"gate": "always"} if strategy == "two_batch" else {}
    return attrs.evolve(
        config,
        launch=LaunchConfig(device="cuda"),
        checkpoint=attrs.evolve(config.checkpoint, dtype=dtype),
        strategy=PluginChoice(name=strategy, options=options),
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, which two ranks can share")
@pytest.mark.parametrize(("dispatcher", "dtype"), TRANSPORTS)
def test_logits_do_not_depend_on_the_strategy(pool: RankPool, folder: Path, dispatcher: str, dtype: str) -> None:
    expected = run_on_pool(pool, logits_job(folder, PROMPTS, config_of(folder, dispatcher, dtype, "sequential")))
    for strategy in ("single_batch", "two_batch"):
        found = run_on_pool(pool, logits_job(folder, PROMPTS, config_of(folder, dispatcher, dtype, strategy)))
        for ours, wanted in zip(found.ordered_logits(), expected.ordered_logits(), strict=True):
            difference = float(np.abs(ours - wanted).max() / np.abs(wanted).max())
            assert difference <= (TOLERANCES[dtype] if strategy == "two_batch" else 0.0), strategy
        assert (found.receipt["counts"]["overlap"]["on"] > 0) == (strategy == "two_batch")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, which two ranks can share")
def test_captured_decode_in_two_halves_gives_most_of_the_tokens_of_one(pool: RankPool, folder: Path) -> None:
    """Halves round differently, so that near ties may fall either way; a wrong row or slot would change nearly all tokens.

    Steps with prompts are captured as a whole here, so that those which overlap are decode steps.
    """
    like = prompts(LIKE_LENGTHS)
    tokens: dict[str, list[list[int]]] = {}
    for strategy in ("sequential", "two_batch"):
        job = offline_job(folder, like, GREEDY, config_of(folder, "nvlink", "bfloat16", strategy))
        result = run_on_pool(pool, job)
        tokens[strategy] = [new_tokens(result.outputs[str(index)]) for index in range(len(like))]
        counts = result.receipt["counts"]
        assert counts["graph"]["graph"] > 0
        assert (counts["overlap"]["on"] > 0) == (strategy == "two_batch")
    same = sum(a == b for a, b in zip(tokens["sequential"], tokens["two_batch"], strict=True))
    assert same >= 0.7 * len(like)
