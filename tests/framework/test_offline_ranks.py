"""Logits and tokens on 2 and 4 real ranks equal those of one process, in every layout, with uneven and empty replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import numpy as np
import pytest
import structlog
from crossdock.config import Config, ParallelConfig
from crossdock.offline import generate, logits, logits_job, new_tokens, offline_job
from crossdock.testing.engine_ranks import run_on_pool
from crossdock.testing.random_models import random_model_config, write_random_model
from crossdock.testing.world import RankPool
from crossdock.types.request import SamplingParams

TOLERANCE = 1e-5
"""Relative to the largest logit, against our own one-process run in fp32."""
UNEVEN = [[(7 * place + 3 * index) % 96 for place in range(length)] for index, length in enumerate((5, 1, 23, 9, 2))]
ONE = [[5, 6, 7, 8, 9]]
"""One prompt: with attention DP all other replicas are empty."""
LAYOUTS = {
    2: [(2, 1, 2, 1), (1, 2, 2, 1), (2, 1, 1, 2)],
    4: [(4, 1, 4, 1), (2, 2, 4, 1), (2, 2, 2, 2), (1, 4, 4, 1)],
}
"""(attn_dp, attn_tp, moe_ep, moe_tp) by number of ranks."""
FAMILIES = {2: "qwen3_moe", 4: "deepseek_v3"}
"""By number of ranks; the matrix of plugin choices has the other combinations."""
CASES = [
    (ranks, layout, dispatcher, padding)
    for ranks, layouts in LAYOUTS.items()
    for place, layout in enumerate(layouts)
    for dispatcher in ("allgatherv", "alltoallv")
    if dispatcher == "allgatherv" or layout[2] == ranks
    for padding in (("max_len", "sum_len", "cost")[place % 3],)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The model of each number of ranks."""
    return {ranks: write_random_model(tmp_path_factory.mktemp("model"), family) for ranks, family in FAMILIES.items()}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


def spread_config(folder: Path, ranks: int, layout: tuple[int, int, int, int], dispatcher: str, padding: str) -> Config:
    config = random_model_config(folder, ranks=ranks, dispatcher=dispatcher, padding=padding, chunk_tokens=7)
    attn_dp, attn_tp, moe_ep, moe_tp = layout
    parallel = ParallelConfig(
        ranks=ranks, attn_dp_size=attn_dp, attn_tp_size=attn_tp, moe_ep_size=moe_ep, moe_tp_size=moe_tp
    )
    return attrs.evolve(config, parallel=parallel)


@pytest.mark.parametrize(("ranks", "layout", "dispatcher", "padding"), CASES)
def test_logits_on_many_ranks_are_those_of_one_process(
    folders: dict[int, Path],
    rank_pool: Callable[[int], RankPool],
    ranks: int,
    layout: tuple[int, int, int, int],
    dispatcher: str,
    padding: str,
) -> None:
    folder = folders[ranks]
    config = spread_config(folder, ranks, layout, dispatcher, padding)
    for prompts in (UNEVEN, ONE):
        expected = logits(folder, prompts, random_model_config(folder))
        job = logits_job(folder, prompts, config)
        result = run_on_pool(rank_pool(ranks), job)
        for index, array in enumerate(expected):
            ours = result.logits[str(index)]
            assert ours.shape == array.shape
            assert np.abs(ours - array).max() <= TOLERANCE * np.abs(array).max()


@pytest.mark.parametrize("layout", [(2, 1, 2, 1), (1, 2, 2, 1)])
def test_seeded_and_greedy_tokens_do_not_depend_on_ranks_or_replicas(
    folders: dict[int, Path], rank_pool: Callable[[int], RankPool], layout: tuple[int, int, int, int]
) -> None:
    folder = folders[2]
    greedy = SamplingParams(max_new_tokens=6, temperature=0.0)
    seeded = SamplingParams(max_new_tokens=6, temperature=1.0, seed=11)
    sampling = [seeded, greedy, greedy, seeded, seeded]
    expected = [new_tokens(outputs) for outputs in generate(folder, UNEVEN, sampling, random_model_config(folder))]
    config = spread_config(folder, 2, layout, "alltoallv", "cost")
    for prompts, params, answers in (
        (UNEVEN, sampling, expected),
        (UNEVEN[::-1], sampling[::-1], expected[::-1]),
    ):
        result = run_on_pool(rank_pool(2), offline_job(folder, prompts, params, config))
        assert [new_tokens(result.outputs[str(index)]) for index in range(5)] == answers


def test_attention_tp_peers_follow_prompt_chunks_and_preemptions(
    folders: dict[int, Path], rank_pool: Callable[[int], RankPool]
) -> None:
    folder = folders[2]
    greedy = SamplingParams(max_new_tokens=8, temperature=0.0)
    expected = [new_tokens(outputs) for outputs in generate(folder, UNEVEN, greedy, random_model_config(folder))]
    config = spread_config(folder, 2, (1, 2, 2, 1), "alltoallv", "cost")
    tight = attrs.evolve(config.scheduler, kv_tokens=40, max_running_requests=4, max_step_tokens=16)
    job = offline_job(folder, UNEVEN, greedy, attrs.evolve(config, scheduler=tight))
    result = run_on_pool(rank_pool(2), job)
    assert [new_tokens(result.outputs[str(index)]) for index in range(5)] == expected
