"""Every family on 2 and 4 real ranks: layouts, dispatchers, padding, uneven and idle replicas, against transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from crossdock.groups import rank_place, resolve_sizes
from crossdock.testing.model_driver import Work, run_on_rank
from crossdock.testing.model_oracle import TOLERANCE, relative_error
from crossdock.testing.model_parts import DriverChoice
from crossdock.testing.tiny_models import oracle_logits, save_tiny_model
from crossdock.testing.world import RankPool
from crossdock.types.step import PaddingMode

PROMPTS = (11, 6, 3)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": [1], "vocab_size": 97}),
    "deepseek_v3": ("deepseek_v3", {"first_k_dense_replace": 1, "attention_bias": True, "vocab_size": 97}),
    "deepseek_v2": ("deepseek_v2", {"q_lora_rank": None, "n_shared_experts": 2}),
    "mixtral": ("mixtral", {"num_key_value_heads": 1}),
}
"""97 tokens cannot be split equally, one key head must be held by several ranks."""


@attrs.frozen
class Layout:
    """A parallel layout and what runs on it."""

    ranks: int
    attn_dp: int
    moe_ep: int
    dispatcher: str
    padding: PaddingMode
    dense_tp: int = 0
    redundant: int = 0


SUM, MAX = PaddingMode.SUM_LEN, PaddingMode.MAX_LEN
LAYOUTS = {
    "dp2 ep2 allgatherv": Layout(2, 2, 2, "allgatherv", SUM),
    "dp2 ep2 alltoallv": Layout(2, 2, 2, "alltoallv", MAX),
    "tp2 moe-tp2": Layout(2, 1, 1, "allgatherv", MAX),
    "tp2 ep2 alltoallv, dense whole": Layout(2, 1, 2, "alltoallv", SUM, dense_tp=1),
    "dp2 tp2 ep4 alltoallv": Layout(4, 2, 4, "alltoallv", SUM, redundant=4),
    "dp2 tp2 ep2 moe-tp2": Layout(4, 2, 2, "allgatherv", MAX),
    "dp4 ep4 allgatherv, dense whole": Layout(4, 4, 4, "allgatherv", SUM, dense_tp=1, redundant=4),
    "tp4 ep4 allgatherv, dense split": Layout(4, 1, 4, "allgatherv", MAX, dense_tp=4),
    "dp4 moe-tp4": Layout(4, 4, 1, "allgatherv", SUM),
    "tp4 ep4 alltoallv": Layout(4, 1, 4, "alltoallv", MAX),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: save_tiny_model(folder / name, family, **fields) for name, (family, fields) in MODELS.items()}


@pytest.fixture(scope="module")
def wanted(checkpoints: Mapping[str, Path]) -> dict[str, list[tuple[list[int], torch.Tensor]]]:
    """Ids and the oracle's logits of every prompt of every model."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(96, (length,), generator=generator).tolist() for length in PROMPTS]
    return {name: [(ids, oracle_logits(folder, ids)) for ids in prompts] for name, folder in checkpoints.items()}


def steps_of(replicas: int, prompts: Sequence[Sequence[int]]) -> list[list[Work]]:
    """Chunks and single tokens so that replicas are uneven, and idle in turn; with four replicas two of them never get a row."""
    first, second, third = prompts
    last = replicas - 1

    def step(*work: tuple[int, int, Sequence[int]]) -> list[Work]:
        rows: list[dict[int, Sequence[int]]] = [{} for _ in range(replicas)]
        for replica, sequence, tokens in work:
            rows[replica][sequence] = tokens
        return list(rows)

    return [
        step((0, 0, first[:4])),
        step((0, 0, first[4:5]), (last, 1, second[:5])),
        step((last, 1, second[5:])),
        step((0, 2, third), (0, 0, first[5:])),
    ]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_equal_transformers_on_ranks(
    rank_pool: Callable[[int], RankPool],
    checkpoints: Mapping[str, Path],
    wanted: Mapping[str, Sequence[tuple[list[int], torch.Tensor]]],
    model: str,
    name: str,
) -> None:
    layout = LAYOUTS[name]
    sizes = resolve_sizes(
        ranks=layout.ranks,
        attn_dp_size=layout.attn_dp,
        moe_ep_size=layout.moe_ep,
        moe_tp_size=layout.ranks // layout.moe_ep,
    )
    choice = DriverChoice(
        folder=str(checkpoints[model]),
        dispatcher=layout.dispatcher,
        padding_mode=layout.padding,
        dense_tp_size=layout.dense_tp,
        redundant_experts=layout.redundant,
    )
    steps = steps_of(layout.attn_dp, [ids for ids, _ in wanted[model]])
    results = rank_pool(layout.ranks).run(run_on_rank, choice, sizes, steps, timeout_s=90)
    seen: set[int] = set()
    for rank, answers in enumerate(results):
        for sequence in {key for answer in answers for key in answer}:
            found = torch.cat([answer[sequence] for answer in answers if sequence in answer])
            error = relative_error(found, wanted[model][sequence][1])
            assert error < TOLERANCE, f"rank {rank} ({rank_place(sizes, rank)}), sequence {sequence}: {error}"
            seen.add(sequence)
    assert seen == {0, 1, 2}
