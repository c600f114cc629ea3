"""Offline jobs on a pool: ranks that share a GPU share its memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from crossdock.comm import local_comms
from crossdock.runner_build import agreed_memory_plan
from crossdock.testing.engine_ranks import plan_on
from crossdock.testing.random_models import random_model_config, write_random_model
from crossdock.testing.rank_worker import ranks_per_gpu
from crossdock.testing.world import RankContext, RankPool

GIB = 2**30


def number_of_sharing_ranks(context: RankContext) -> int:
    return context.ranks_per_gpu


@pytest.mark.parametrize(
    ("ranks", "num_gpus", "sharing"), [(1, 1, 1), (2, 2, 1), (2, 8, 1), (2, 1, 2), (4, 2, 2), (3, 2, 2), (2, 0, 2)]
)
def test_a_pool_puts_as_few_ranks_on_a_gpu_as_it_can(ranks: int, num_gpus: int, sharing: int) -> None:
    assert ranks_per_gpu(ranks, num_gpus) == sharing


def test_ranks_on_a_cpu_share_no_gpu(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(2).run(number_of_sharing_ranks) == [1, 1]


@pytest.mark.parametrize("sharing", [1, 2])
def test_a_pools_ranks_on_one_gpu_plan_with_their_part_of_its_memory(
    sharing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * GIB, 16 * GIB))
    context = RankContext(rank=0, size=2, comms_of=lambda sizes: local_comms(), device="cuda", ranks_per_gpu=sharing)
    config = random_model_config(write_random_model(tmp_path / "model"), ranks=2, attn_dp=2, dispatcher="alltoallv")
    memory = agreed_memory_plan(plan_on(context, config), local_comms(), torch.device("cuda", 0))
    assert memory.available_bytes == 8 * GIB // sharing
