"""The memory plan: its parts by hand for one shape, refusal with the numbers, and what the machine says there is."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch
from crossdock.comm import local_comms
from crossdock.config import Config, EplbConfig
from crossdock.errors import ConfigValueError
from crossdock.host_memory import HEAP_MARGIN_BYTES, KERNEL_CACHE_BYTES, available_bytes, machine_bytes
from crossdock.memory_plan import plan_memory
from crossdock.offline import logits
from crossdock.rank_plan import plan_rank
from crossdock.runner_build import agreed_memory_plan
from crossdock.testing.random_models import random_model_config, write_random_model

GIB = 1 << 30
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "moe_intermediate_size": 32,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}
EXPERT_BYTES = 2 * 3 * 64 * 32 * 4
"""Of one expert, over both layers."""
SPLIT_BYTES = (2 * 100 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32)) * 4
"""Embedding, head, and the attention's projections."""
WHOLE_BYTES = (2 * (2 * 64 + 2 * 16 + 8 * 64) + 64) * 4
"""Norms and routers."""
TOKEN_BYTES = 2 * 2 * (16 + 16) * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), **SHAPE)


def config(folder: Path, **changes: object) -> Config:
    return attrs.evolve(random_model_config(folder), **changes)  # type: ignore[arg-type]


def test_one_rank_holds_everything(folder: Path) -> None:
    memory = plan_memory(plan_rank(config(folder), 0), GIB, GIB)
    assert memory.weights_bytes == 8 * EXPERT_BYTES + SPLIT_BYTES + WHOLE_BYTES
    assert (memory.kv_tokens, memory.kv_bytes) == (1024, 1024 * TOKEN_BYTES)
    assert (memory.dispatcher_bytes, memory.moving_bytes, memory.graphs_bytes) == (0, 0, 0)
    assert memory.kept_bytes == HEAP_MARGIN_BYTES + KERNEL_CACHE_BYTES
    memory.check()


def test_ranks_share_experts_and_projections_and_redundant_slots_count(folder: Path) -> None:
    parallel = random_model_config(folder, ranks=2).parallel
    eplb = EplbConfig(enabled=True, slots=10)
    memory = plan_memory(plan_rank(config(folder, parallel=parallel, eplb=eplb), 0), GIB, GIB)
    assert memory.weights_bytes == 5 * EXPERT_BYTES + SPLIT_BYTES // 2 + WHOLE_BYTES
    assert memory.moving_bytes == 5 * EXPERT_BYTES // 2, "one layer of a rank's slots"
    assert memory.dispatcher_bytes == 2 * 2 * 1024 * 64 * 4


def test_a_derived_cache_takes_what_is_left_and_one_page_at_the_least(folder: Path) -> None:
    scheduler = attrs.evolve(random_model_config(folder).scheduler, kv_tokens=0)
    plan = plan_rank(config(folder, scheduler=scheduler), 0)
    room = plan_memory(plan, GIB, 64 * GIB)
    assert room.kv_tokens == 64 * plan.max_sequence_tokens
    small = plan_memory(plan, room.needed_bytes - room.kv_bytes + 40 * TOKEN_BYTES, 64 * GIB)
    assert small.kv_tokens == 40
    assert plan_memory(plan, GIB, 8 * 100 * TOKEN_BYTES).kv_tokens == 100, "an eighth of the machine"
    none = plan_memory(plan, 1000, GIB)
    assert none.kv_tokens == 4
    with pytest.raises(ConfigValueError, match=r"memory: a rank needs .* MiB of 0 MiB on this machine: weights"):
        none.check()


def test_a_start_that_cannot_fit_is_refused_with_the_numbers_before_anything_is_allocated(folder: Path) -> None:
    scheduler = attrs.evolve(random_model_config(folder).scheduler, kv_tokens=1 << 40)
    with pytest.raises(ConfigValueError, match="KV cache of 1099511627776 tokens 536,870,912 MiB") as error:
        logits(folder, [[1, 2]], config(folder, scheduler=scheduler))
    assert "lower scheduler.kv_tokens" in str(error.value)


def test_the_limit_of_a_container_counts_and_its_file_caches_do_not(tmp_path: Path) -> None:
    information = tmp_path / "meminfo"
    information.write_text("MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    groups = tmp_path / "groups"
    groups.mkdir()
    assert machine_bytes(groups) > GIB
    assert available_bytes(groups, information) == 5000 * 1024
    (groups / "memory.max").write_text("4000000\n")
    (groups / "memory.current").write_text("3000000\n")
    (groups / "memory.stat").write_text("anon 1\nactive_file 500000\ninactive_file 100000\n")
    assert machine_bytes(groups) == 4000000
    assert available_bytes(groups, information) == 1600000
    (groups / "memory.max").write_text("max\n")
    assert available_bytes(groups, information) == 5000 * 1024


@pytest.mark.parametrize("ranks_per_gpu", [1, 2, 4])
def test_ranks_that_share_a_gpu_plan_with_their_part_of_it(
    ranks_per_gpu: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * GIB, 16 * GIB))
    plan = plan_rank(config(folder), 0)
    launch = attrs.evolve(plan.config.launch, ranks_per_gpu=ranks_per_gpu)
    plan = attrs.evolve(plan, config=attrs.evolve(plan.config, launch=launch))
    memory = agreed_memory_plan(plan, local_comms(), torch.device("cuda", 0))
    assert memory.available_bytes == 8 * GIB // ranks_per_gpu
