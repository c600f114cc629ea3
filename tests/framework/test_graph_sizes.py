"""Which decode sizes are captured, and which of them in two micro-batches, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from crossdock.config import CheckpointConfig, Config, LaunchConfig, ParallelConfig, PluginChoice, SchedulerConfig
from crossdock.graph_sizes import captured_rows, overlapped_rows
from crossdock.rank_plan import plan_rank
from crossdock.testing.random_models import write_random_model

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


def test_nothing_is_captured_with_graphs_off(config: Config) -> None:
    off = attrs.evolve(
        config,
        strategy=PluginChoice(name="two_batch"),
        scheduler=attrs.evolve(config.scheduler, graphs="off"),
    )
    plan = plan_rank(off, 0)
    assert captured_rows(plan) == overlapped_rows(plan) == ()
