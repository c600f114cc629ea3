"""Which sizes of steps are captured, and which of them in two micro-batches, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from crossdock.config import (
    CheckpointConfig,
    Config,
    EplbConfig,
    LaunchConfig,
    ParallelConfig,
    PluginChoice,
    RecorderConfig,
    SchedulerConfig,
)
from crossdock.graph_sizes import (
    CAPTURED_CONTEXT_BYTES,
    captured_pairs,
    captured_prefill_rows,
    captured_rows,
    overlapped_rows,
)
from crossdock.memory_plan import GRAPH_BYTES, plan_memory
from crossdock.rank_plan import plan_rank, step_depth
from crossdock.testing.random_models import write_random_model
from crossdock.types.attention import KvSpec

SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 70)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        checkpoint=CheckpointConfig(path=str(write_random_model(tmp_path)), load_format="random", dtype="bfloat16"),
        launch=LaunchConfig(device="cuda"),
        parallel=ParallelConfig(ranks=2, attn_dp_size=2),
        scheduler=SchedulerConfig(max_running_requests=70),
        dispatcher=PluginChoice(name="nvlink"),
        experts=PluginChoice(name="triton"),
        attention=PluginChoice(name="triton"),
    )


@pytest.mark.parametrize(
    ("strategy", "options", "dispatcher", "overlapped"),
    [
        ("sequential", {}, "nvlink", ()),
        ("two_batch", {}, "nvlink", (32, 40, 48, 56, 64, 70)),
        ("two_batch", {"min_decode_rows": 64}, "nvlink", (64, 70)),
        ("two_batch", {"gate": "always"}, "nvlink", SIZES[1:]),
        ("two_batch", {}, "allgatherv", ()),
        ("two_batch", {"gate": "always"}, "allgatherv", SIZES[1:]),
    ],
)
def test_sizes_that_may_overlap_are_captured_both_ways(
    config: Config, strategy: str, options: dict[str, Any], dispatcher: str, overlapped: tuple[int, ...]
) -> None:
    chosen = attrs.evolve(
        config,
        strategy=PluginChoice(name=strategy, options=options),
        dispatcher=PluginChoice(name=dispatcher),
    )
    plan = plan_rank(chosen, 0)
    assert captured_rows(plan) == SIZES
    assert overlapped_rows(plan) == overlapped


@pytest.mark.parametrize(
    ("limits", "attn_tp", "sizes"),
    [
        ({}, 1, (64, 128, 256, 512, 1024)),
        ({"graph_prefill_rows": 0}, 1, ()),
        ({"graph_prefill_rows": 100}, 1, (64, 100)),
        ({"graph_prefill_rows": 33}, 2, (34,)),
        ({"max_step_tokens": 128}, 1, (64, 128)),
    ],
)
def test_small_steps_with_prompt_tokens_are_captured_up_to_the_configured_rows(
    config: Config, limits: dict[str, int], attn_tp: int, sizes: tuple[int, ...]
) -> None:
    chosen = attrs.evolve(
        config,
        scheduler=attrs.evolve(config.scheduler, **limits),
        parallel=ParallelConfig(ranks=2, attn_dp_size=2 // attn_tp, attn_tp_size=attn_tp),
    )
    assert captured_prefill_rows(plan_rank(chosen, 0)) == sizes


def test_prompts_are_captured_up_to_what_their_rows_read_of_the_cache(config: Config) -> None:
    plan = plan_rank(config, 0)
    kv = plan.info.kv
    assert captured_pairs(plan, 2) == CAPTURED_CONTEXT_BYTES // (kv.num_kv_heads * (kv.head_dim + kv.v_head_dim) * 2)
    latent = KvSpec(kind="mla", kv_lora_rank=512, rope_dim=64)
    many_heads = attrs.evolve(plan, info=attrs.evolve(plan.info, kv=latent, num_heads=128))
    assert captured_pairs(many_heads, 2) == CAPTURED_CONTEXT_BYTES // (576 * 2 * 8)


def test_nothing_is_captured_with_graphs_off(config: Config) -> None:
    off = attrs.evolve(
        config,
        strategy=PluginChoice(name="two_batch"),
        scheduler=attrs.evolve(config.scheduler, graphs="off"),
    )
    plan = plan_rank(off, 0)
    assert captured_rows(plan) == overlapped_rows(plan) == captured_prefill_rows(plan) == ()


@pytest.mark.parametrize(
    ("mode", "is_captured"),
    [("off", True), ("stat", True), ("per_pass", True), ("stat_approx", False), ("per_token", False)],
)
def test_routed_counts_are_taken_inside_a_graph_and_whatever_else_a_recorder_keeps_needs_eager_steps(
    config: Config, mode: str, is_captured: bool
) -> None:
    counting = attrs.evolve(config, eplb=EplbConfig(enabled=True), recorder=RecorderConfig(mode=mode))  # type: ignore[arg-type]
    assert captured_rows(plan_rank(counting, 0)) == (SIZES if is_captured else ())


def test_the_memory_plan_counts_logits_and_page_tables_of_every_captured_size(config: Config) -> None:
    plan = plan_rank(config, 0)
    memory = plan_memory(plan, 1 << 37, 1 << 37)
    prompts = captured_prefill_rows(plan)
    logits = (sum(SIZES) + sum(min(rows, SIZES[-1]) for rows in prompts)) * plan.info.vocab_size
    tables = sum((*SIZES, *prompts)) * -(-plan.max_sequence_tokens // plan.config.scheduler.page_tokens)
    assert memory.graphs_bytes == (logits + tables) * 4 + len((*SIZES, *prompts)) * GRAPH_BYTES
    assert "on this GPU" in memory.sentence()


def test_steps_run_ahead_on_gpus_unless_told_otherwise(config: Config) -> None:
    depths = [
        step_depth(
            plan_rank(
                attrs.evolve(
                    config,
                    launch=LaunchConfig(device=device),  # type: ignore[arg-type]
                    scheduler=attrs.evolve(config.scheduler, depth=depth),
                    dispatcher=PluginChoice(name="allgatherv"),
                    experts=PluginChoice(name="auto"),
                    attention=PluginChoice(name="auto"),
                ),
                0,
            )
        )
        for device, depth in (("cpu", "auto"), ("cpu", "1"), ("cuda", "auto"), ("cuda", "0"))
    ]
    assert depths == [0, 1, 1, 0]
