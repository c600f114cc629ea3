"""The passes before a rank is ready: which, through which modes, and that they touch nothing but the scratch page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from crossdock.batch_build import HostBatch, build_batch
from crossdock.config import CheckpointConfig, Config, LaunchConfig, ParallelConfig, PluginChoice, SchedulerConfig
from crossdock.engine_seams import InFlight
from crossdock.rank_plan import RankPlan, plan_rank
from crossdock.scheduled import Scheduled, StepTokens
from crossdock.step_work import StepWork
from crossdock.testing.random_models import write_random_model
from crossdock.types.step import StepPlan
from crossdock.warm_up import prompt_works, warm_up

PAGE_TOKENS = 16


@attrs.define
class Watched:
    """A ``StepRunner`` that keeps what it was asked for."""

    launched: list[tuple[StepPlan, HostBatch]] = attrs.Factory(list)

    def build(self, work: StepWork, plan: StepPlan) -> HostBatch:
        return build_batch(work, plan, attn_dp_rank=0, page_tokens=PAGE_TOKENS)

    def launch(self, plan: StepPlan, batch: HostBatch, scheduled: Scheduled | None, *, is_counted: bool) -> InFlight:
        assert scheduled is None and not is_counted
        self.launched.append((plan, batch))
        return InFlight(scheduled=None, logits=None, choice=None)  # type: ignore[arg-type]

    def collect(self, in_flight: InFlight) -> StepTokens:
        return StepTokens(token_ids=())


def plan_of(folder: Path, device: str, attn_tp: int = 1, **limits: Any) -> RankPlan:
    on_gpu = device == "cuda"
    config = Config(
        checkpoint=CheckpointConfig(path=str(write_random_model(folder)), load_format="random", dtype="bfloat16"),
        launch=LaunchConfig(device=device),  # type: ignore[arg-type]
        parallel=ParallelConfig(ranks=2, attn_dp_size=2 // attn_tp, attn_tp_size=attn_tp),
        scheduler=SchedulerConfig(page_tokens=PAGE_TOKENS, **limits),
        dispatcher=PluginChoice(name="nvlink" if on_gpu else "allgatherv"),
        experts=PluginChoice(name="triton" if on_gpu else "auto"),
        attention=PluginChoice(name="triton" if on_gpu else "auto"),
    )
    return plan_rank(config, 0)


def test_a_cpu_rank_runs_padding_only(tmp_path: Path) -> None:
    runner = Watched()
    warm_up(runner, plan_of(tmp_path, "cpu"))
    assert [batch.num_live for _, batch in runner.launched] == [0]


@pytest.mark.parametrize("attn_tp", [1, 2])
def test_a_gpu_rank_runs_every_size_of_prompt_that_no_graph_holds(tmp_path: Path, attn_tp: int) -> None:
    runner = Watched()
    warm_up(
        runner, plan_of(tmp_path, "cuda", attn_tp, max_step_tokens=16384, chunk_tokens=128, max_running_requests=128)
    )
    assert [batch.num_live for _, batch in runner.launched] == [0, 16384, 4096, 129]
    for plan, batch in runner.launched:
        assert plan.bucket is None and not plan.overlap
        assert len(set(plan.live_tokens)) == 1 and batch.num_live == plan.live_tokens[0]
        assert not batch.page_table.any()
        assert (batch.kv_slots < PAGE_TOKENS).all()
        assert batch.num_samples == 0
    assert runner.launched[-1][1].query_lens.tolist() == [1, 128]
    assert runner.launched[-1][1].seq_lens.tolist() == [1, 128 + PAGE_TOKENS]


@pytest.mark.parametrize(
    ("limits", "rows"),
    [
        ({"max_step_tokens": 1024}, []),
        ({"max_step_tokens": 1025, "max_running_requests": 1}, [512]),
        ({"max_step_tokens": 40, "graph_prefill_rows": 0, "max_running_requests": 2}, [40, 10, 2, 1 + 39]),
        ({"max_step_tokens": 1200, "max_sequence_tokens": 100, "max_running_requests": 3}, [300, 1 + 84]),
    ],
)
def test_prompts_stay_within_the_limits(tmp_path: Path, limits: dict[str, int], rows: list[int]) -> None:
    works = prompt_works(plan_of(tmp_path, "cuda", **limits))
    assert [work.num_tokens for work in works] == rows
