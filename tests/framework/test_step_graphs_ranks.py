"""Captured steps with prompt tokens on several ranks: replicas with prompts, rows that generate, and nothing at all replay one bucket.

Real gloo ranks; the pass is repeated instead of a graph. Compared with the same steps run eager.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crossdock import runner_build
from crossdock.config import CheckpointConfig, Config, ParallelConfig, SchedulerConfig
from crossdock.padding import padded_tokens
from crossdock.rank_plan import plan_rank
from crossdock.runner import ModelRunner
from crossdock.step_graphs import StepGraphs
from crossdock.step_work import SequenceRows, StepWork
from crossdock.testing.random_models import write_random_model
from crossdock.testing.repeat_capture import Repeater
from crossdock.types.attention import AttentionSpec
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan
from crossdock_attention.attention.triton.attention import TritonAttention

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `interpreter`)"
)

PREFILL_BUCKET, DECODE_BUCKET, PAGE_TOKENS = 8, 4, 4
TOLERANCE = 1e-5
"""fp32: padding may change the order of a sum."""
PROMPT = SequenceRows(tokens=(5, 6, 7, 8, 9), start=0, pages=(1, 2), num_logit_rows=1, samples=True)
FRONT = SequenceRows(tokens=(3, 2), start=0, pages=(3,))
REST = SequenceRows(tokens=(4, 8, 1), start=2, pages=(3, 4), num_logit_rows=1, samples=True)
NEXT = SequenceRows(tokens=(1,), start=5, pages=(1, 2), num_logit_rows=1, is_decode=True, samples=True)
STEPS: tuple[tuple[tuple[SequenceRows, ...], tuple[SequenceRows, ...]], ...] = (
    ((PROMPT, FRONT), ()),
    ((NEXT, REST), (PROMPT,)),
    ((), (NEXT, FRONT)),
    ((), (REST,)),
)
"""Each replica's work."""


def step_plan(works: list[StepWork], bucket: int | None, attn_tp: int) -> StepPlan:
    live = tuple(work.num_tokens for work in works)
    aligned = [-(-rows // attn_tp) * attn_tp for rows in live]
    modes = {work.forward_mode for work in works} - {ForwardMode.IDLE}
    return StepPlan(
        step=0,
        eplb_pass=0,
        live_tokens=live,
        padded_tokens=padded_tokens(PaddingMode.MAX_LEN, aligned) if bucket is None else (bucket,) * len(works),
        padding_mode=PaddingMode.MAX_LEN,
        forward_mode=modes.pop() if len(modes) == 1 else ForwardMode.MIXED,
        dispatch_mode=DispatchMode.NORMAL,
        overlap=False,
        overlap_reason="",
        bucket=bucket,
    )


def graphs_of(runner: ModelRunner) -> StepGraphs:
    graphs = StepGraphs(
        executor=runner.executor,
        attention=runner.attention,  # type: ignore[arg-type]
        sizes=runner.sizes,
        place=runner.place,
        device=runner.device,
        dispatch_rows=runner.dispatch_rows,
        dispatch_mode=DispatchMode.NORMAL,
        padding_mode=PaddingMode.MAX_LEN,
        page_tokens=PAGE_TOKENS,
        max_sequence_tokens=16,
        capturer=Repeater(),
        sampled=runner.sampled,
    )
    graphs.capture([DECODE_BUCKET], (), [PREFILL_BUCKET])
    return graphs


@torch.inference_mode()
def both_ways(context: Any, folder: str, attn_dp: int, attn_tp: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's (captured, eager) logits of each step."""

    def triton_attention(name: str, options: dict[str, Any], spec: AttentionSpec, *_: object) -> TritonAttention:
        return TritonAttention(spec)

    parallel = ParallelConfig(ranks=attn_dp * attn_tp, attn_dp_size=attn_dp, attn_tp_size=attn_tp)
    scheduler = SchedulerConfig(graphs="off", page_tokens=PAGE_TOKENS, max_sequence_tokens=16, kv_tokens=64)
    config = Config(
        checkpoint=CheckpointConfig(path=folder, dtype="float32", load_format="random"),
        parallel=parallel,
        scheduler=scheduler,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_build, "make_attention", triton_attention)
        plan = plan_rank(config, context.rank)
        runner = runner_build.build_runner(plan, context.comms_of(plan.sizes), torch.device("cpu")).runner
    graphs = graphs_of(runner)
    found: list[list[torch.Tensor]] = []
    for captured, shift in ((graphs, 8), (None, 0)):
        runner.graphs = captured
        found.append([])
        for step in STEPS:
            works = [StepWork(sequences=tuple(moved(rows, shift) for rows in step[d])) for d in range(attn_dp)]
            own = works[plan.place.attn_dp_rank]
            if not any(work.num_tokens for work in works):
                continue
            step_of_all = step_plan(works, None if captured is None else PREFILL_BUCKET, attn_tp)
            batch = runner.build(own, step_of_all)
            found[-1].append(runner.launch(step_of_all, batch, None, is_counted=False).logits.clone())
    return list(zip(*found, strict=True))


def moved(rows: SequenceRows, pages: int) -> SequenceRows:
    """The same rows in other pages of the cache."""
    return SequenceRows(
        tokens=rows.tokens,
        start=rows.start,
        pages=tuple(page + pages for page in rows.pages),
        num_logit_rows=rows.num_logit_rows,
        is_decode=rows.is_decode,
        samples=rows.samples,
    )


@pytest.mark.parametrize(("attn_dp", "attn_tp"), [(2, 1), (1, 2), (2, 2)])
def test_captured_prompts_have_their_eager_logits_on_every_rank(
    rank_pool: Callable[[int], Any], tmp_path: Path, attn_dp: int, attn_tp: int
) -> None:
    folder = write_random_model(tmp_path, num_hidden_layers=2)
    of_ranks = rank_pool(attn_dp * attn_tp).run(both_ways, str(folder), attn_dp, attn_tp, timeout_s=60)
    compared = 0
    for steps in of_ranks:
        for got, want in steps:
            assert got.shape == want.shape
            torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)
            compared += got.shape[0]
    assert compared == attn_tp * (3 if attn_dp == 1 else 6)
