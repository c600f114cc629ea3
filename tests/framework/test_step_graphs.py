"""Captured decode: static buffers and device-side live rows, with a capturer that repeats the pass instead of a graph.

The Triton attention backend runs interpreted on the CPU; on a GPU the same test captures real graphs.
"""

from __future__ import annotations

import gc
import importlib.util
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from crossdock import runner_build
from crossdock.comm import local_comms
from crossdock.config import CheckpointConfig, Config, LaunchConfig, PluginChoice, SchedulerConfig
from crossdock.graph_sizes import bucket_sizes
from crossdock.rank_plan import plan_rank
from crossdock.runner import ModelRunner
from crossdock.step_graphs import Capturer, CudaCapturer, StepGraphs
from crossdock.step_work import SequenceRows, StepWork
from crossdock.testing.random_models import write_random_model
from crossdock.testing.repeat_capture import Repeater
from crossdock.types.attention import AttentionSpec
from crossdock.types.model import ForwardContext
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan
from crossdock_attention.attention.triton.attention import TritonAttention

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `interpreter`)"
)

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BUCKET, PREFILL_BUCKET, PAGE_TOKENS = 3, 9, 4
TOLERANCE = 3e-2 if ON_GPU else 1e-5
"""fp32: the same kernels on padded rows; bf16: another tile may sum in another order."""


@pytest.fixture(params=[False, True], ids=["sequential", "two_batch"])
def two_ways(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def runner(two_ways: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    def triton_attention(name: str, options: dict[str, Any], spec: AttentionSpec, *_: object) -> TritonAttention:
        return TritonAttention(spec)

    monkeypatch.setattr(runner_build, "make_attention", triton_attention)
    config = Config(
        checkpoint=CheckpointConfig(
            path=str(write_random_model(tmp_path, num_hidden_layers=2)),
            dtype="bfloat16" if ON_GPU else "float32",
            load_format="random",
        ),
        launch=LaunchConfig(device=DEVICE.type),
        scheduler=SchedulerConfig(graphs="off", page_tokens=PAGE_TOKENS, max_sequence_tokens=16, kv_tokens=64),
        strategy=PluginChoice(name="two_batch" if two_ways else "sequential"),
    )
    return runner_build.build_runner(plan_rank(config, 0), local_comms(), DEVICE).runner


def graphs_of(runner: ModelRunner, two_ways: bool, capturer: Capturer | None = None) -> StepGraphs:
    graphs = StepGraphs(
        executor=runner.executor,
        attention=runner.attention,  # type: ignore[arg-type]
        sizes=runner.sizes,
        place=runner.place,
        device=DEVICE,
        dispatch_rows=runner.dispatch_rows,
        dispatch_mode=DispatchMode.NORMAL,
        padding_mode=PaddingMode.MAX_LEN,
        page_tokens=PAGE_TOKENS,
        max_sequence_tokens=16,
        capturer=capturer or (CudaCapturer() if ON_GPU else Repeater()),
        sampled=runner.sampled,
    )
    graphs.capture([BUCKET], [BUCKET] if two_ways else [], [PREFILL_BUCKET])
    return graphs


def step_plan(work: StepWork, bucket: int | None, overlap: bool = False) -> StepPlan:
    rows = work.num_tokens
    return StepPlan(
        step=0,
        eplb_pass=0,
        live_tokens=(rows,),
        padded_tokens=(rows if bucket is None else bucket,),
        padding_mode=PaddingMode.MAX_LEN,
        forward_mode=work.forward_mode if rows else ForwardMode.IDLE,
        dispatch_mode=DispatchMode.NORMAL,
        overlap=overlap,
        overlap_reason="",
        bucket=bucket,
        overlap_rows=(rows // 2,) if overlap else (),
    )


def logits(runner: ModelRunner, work: StepWork, bucket: int | None, overlap: bool = False) -> torch.Tensor:
    plan = step_plan(work, bucket, overlap)
    return runner.launch(plan, runner.build(work, plan), None, is_counted=False).logits.clone()


def decode(token: int, start: int, pages: tuple[int, ...]) -> SequenceRows:
    return SequenceRows(tokens=(token,), start=start, pages=pages, num_logit_rows=1, is_decode=True)


def prompt(tokens: tuple[int, ...], start: int, pages: tuple[int, ...], *, samples: bool = True) -> SequenceRows:
    return SequenceRows(tokens=tokens, start=start, pages=pages, num_logit_rows=int(samples), samples=samples)


@torch.inference_mode()
def test_replays_of_one_bucket_give_each_step_its_eager_logits(runner: ModelRunner, two_ways: bool) -> None:
    prompts = StepWork(
        sequences=(
            SequenceRows(tokens=(5, 6, 7, 8, 9), start=0, pages=(1, 2), num_logit_rows=1),
            SequenceRows(tokens=(3,), start=0, pages=(3,), num_logit_rows=1),
        )
    )
    logits(runner, prompts, None)
    steps = (
        StepWork(sequences=(decode(1, 5, (1, 2)), decode(2, 1, (3,)))),
        StepWork(sequences=(decode(4, 2, (3,)),)),
        StepWork(sequences=(decode(9, 6, (1, 2)), decode(8, 3, (3,)), decode(7, 0, (4,)))),
        StepWork(),
    )
    graphs = graphs_of(runner, two_ways)
    # One row cannot be cut; a replica without rows has two empty halves.
    for work in steps:
        want = logits(runner, work, None)
        for overlap in (False, True) if two_ways and work.num_tokens != 1 else (False,):
            runner.graphs = graphs
            got = logits(runner, work, BUCKET, overlap)
            runner.graphs = None
            assert got.shape == want.shape
            torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def steps_with_prompts(first_page: int) -> tuple[StepWork, ...]:
    """Prompts whole, in chunks, behind a cached front and beside rows that generate; then a decode step that reads all of it."""
    one, two, three, four, five = range(first_page, first_page + 5)
    return (
        StepWork(sequences=(prompt((5, 6, 7, 8, 9), 0, (one, two)), prompt((3, 2), 0, (three,), samples=False))),
        StepWork(sequences=(decode(1, 5, (one, two)), prompt((4, 8, 1), 2, (three, four)), prompt((7,), 0, (five,)))),
        StepWork(sequences=(prompt((1, 2, 3, 4, 5, 6, 2, 1), 4, (one, first_page + 5, first_page + 6)),)),
        StepWork(sequences=(decode(2, 1, (five,)), decode(9, 12, (one, first_page + 5, first_page + 6, four)))),
    )


@torch.inference_mode()
def test_steps_with_prompt_tokens_have_their_eager_logits_and_leave_the_same_cache(runner: ModelRunner) -> None:
    want = [logits(runner, work, None) for work in steps_with_prompts(1)]
    runner.graphs = graphs_of(runner, two_ways=False)
    for step, work in enumerate(steps_with_prompts(8)):
        got = logits(runner, work, BUCKET if work.forward_mode is ForwardMode.DECODE else PREFILL_BUCKET)
        assert got.shape == want[step].shape
        torch.testing.assert_close(got, want[step], rtol=TOLERANCE, atol=TOLERANCE)
        assert runner.sampled[: got.shape[0]].tolist() == got.argmax(dim=-1).tolist()


def test_bucket_sizes_end_at_the_most_rows_and_keep_the_multiple() -> None:
    assert bucket_sizes(1, 1) == (1,)
    assert bucket_sizes(20, 1) == (1, 2, 4, 8, 16, 20)
    assert bucket_sizes(20, 8) == (8, 16, 24)
    assert bucket_sizes(256, 1)[-3:] == (192, 224, 256)


@torch.inference_mode()
def test_what_a_captured_pass_reads_is_kept_although_a_graph_knows_addresses_only(
    runner: ModelRunner, two_ways: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    run = runner.executor.run

    def watched(contexts: Sequence[ForwardContext]) -> tuple[torch.Tensor, ...]:
        for context in contexts:
            padded_rows = context.dispatch_step.padded_rows
            assert padded_rows is not None
            seen.extend((weakref.ref(context.batch.input_ids), weakref.ref(padded_rows)))
        return run(contexts)

    class Forgetful:
        """Keeps nothing of what it was given, as a graph does."""

        def capture(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
            return (lambda: None), compute()

    monkeypatch.setattr(runner.executor, "run", watched)
    graphs = graphs_of(runner, two_ways, Forgetful())
    gc.collect()
    assert len(seen) == 2 * (2 + 2 * two_ways)
    assert all(reference() is not None for reference in seen)
    del graphs
    gc.collect()
    assert all(reference() is None for reference in seen)
