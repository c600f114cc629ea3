"""Many captured steps of changing size against the same passes run operation by operation; and a rebalance between two replays.

On a GPU real graphs are compared with the repeated pass, bit for bit; on a CPU the pass is repeated on both sides, which proves the bookkeeping.
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import attrs
import msgspec
import numpy as np
import pytest
import torch
from crossdock import runner_build
from crossdock.comm import local_comms
from crossdock.config import (
    CheckpointConfig,
    Config,
    EplbConfig,
    LaunchConfig,
    PluginChoice,
    RecorderConfig,
    SchedulerConfig,
)
from crossdock.location import overwrite_layer
from crossdock.rank_plan import plan_rank
from crossdock.runner import ModelRunner
from crossdock.runner_build import BuiltRunner
from crossdock.step_graphs import CudaCapturer, StepGraphs
from crossdock.step_work import PENDING, SequenceRows, StepWork
from crossdock.testing.random_models import write_random_model
from crossdock.testing.repeat_capture import Repeater
from crossdock.types.attention import Attention, AttentionSpec
from crossdock.types.placement import Placement
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan
from crossdock_attention.attention.triton.attention import TritonAttention

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `interpreter`)"
)

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
STEPS = 1000 if ON_GPU else 4
BUCKETS = (1, 2, 4, 8) if ON_GPU else (1, 4)
PREFILL_BUCKETS = (16, 64) if ON_GPU else (8, 16)
PAGE_TOKENS, PAGES_EACH = 4, 12
TOLERANCE = 0.0 if ON_GPU else 1e-5
"""The experts of a GPU add up a token's choices in their order, those of a CPU in the order of the slots."""
SHAPE = {"num_hidden_layers": 2, "num_experts": 8, "hidden_size": 64, "moe_intermediate_size": 64}
"""Sizes that every kernel takes."""
SLOTS = 10
"""Physical experts of the tiny models' 8."""


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltRunner:
    def triton_attention(name: str, options: object, spec: AttentionSpec, *_: object) -> Attention:
        return TritonAttention(spec)

    monkeypatch.setattr(runner_build, "make_attention", triton_attention)
    config = Config(
        checkpoint=CheckpointConfig(
            path=str(write_random_model(tmp_path, **SHAPE)),
            dtype="bfloat16" if ON_GPU else "float32",
            load_format="random",
        ),
        launch=LaunchConfig(device=DEVICE.type),
        scheduler=SchedulerConfig(
            graphs="off",
            max_running_requests=max(BUCKETS),
            page_tokens=PAGE_TOKENS,
            max_sequence_tokens=PAGE_TOKENS * PAGES_EACH,
            kv_tokens=PAGE_TOKENS * PAGES_EACH * max(BUCKETS),
        ),
        eplb=EplbConfig(slots=SLOTS),
        expert_location=PluginChoice(name="static"),
        recorder=RecorderConfig(mode="stat"),
    )
    return runner_build.build_runner(plan_rank(config, 0), local_comms(), DEVICE)


def graphs_of(runner: ModelRunner, *, is_captured: bool) -> StepGraphs:
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
        max_sequence_tokens=PAGE_TOKENS * PAGES_EACH,
        capturer=CudaCapturer() if is_captured and ON_GPU else Repeater(),
        sampled=runner.sampled,
        recorder=runner.recorder,
    )
    graphs.capture(BUCKETS, (), PREFILL_BUCKETS)
    return graphs


class Sequences:
    """Sequences that grow by a token a step and start again when they are full; each owns its pages."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._draw = random.Random(seed)
        self._vocab = vocab_size
        self._lengths = [0] * max(BUCKETS)
        self._before: list[int] = []

    def step(self, least: int = 0) -> StepWork:
        """Some of them, in any order; a token is known, or that of the step before."""
        own = self._draw.sample(range(len(self._lengths)), self._draw.randint(least, len(self._lengths)))
        rows: list[SequenceRows] = []
        for sequence in own:
            start = self._lengths[sequence] = self._lengths[sequence] % (PAGE_TOKENS * PAGES_EACH - 1)
            pages = range(1 + sequence * PAGES_EACH, 1 + (sequence + 1) * PAGES_EACH)
            source = self._before.index(sequence) if sequence in self._before and self._draw.random() < 0.5 else -1
            rows.append(
                SequenceRows(
                    tokens=(PENDING if source >= 0 else self._draw.randrange(self._vocab),),
                    start=start,
                    pages=tuple(pages[: start // PAGE_TOKENS + 1]),
                    num_logit_rows=1,
                    is_decode=True,
                    samples=True,
                    source=source,
                )
            )
            self._lengths[sequence] += 1
        self._before = own
        return StepWork(sequences=tuple(rows))

    def step_with_prompts(self) -> StepWork:
        """The same, and some of the others take in several tokens, as much as the largest bucket holds."""
        rows = list(self.step().sequences)
        left = max(PREFILL_BUCKETS) - len(rows)
        for sequence in sorted(set(range(len(self._lengths))) - set(self._before)):
            start = self._lengths[sequence] % (PAGE_TOKENS * PAGES_EACH - 1)
            count = self._draw.randint(1, PAGE_TOKENS * PAGES_EACH - start)
            if count > left:
                break
            left -= count
            samples = self._draw.random() < 0.5
            pages = range(1 + sequence * PAGES_EACH, 1 + (sequence + 1) * PAGES_EACH)
            rows.append(
                SequenceRows(
                    tokens=tuple(self._draw.randrange(self._vocab) for _ in range(count)),
                    start=start,
                    pages=tuple(pages[: (start + count - 1) // PAGE_TOKENS + 1]),
                    num_logit_rows=int(samples),
                    samples=samples,
                )
            )
            self._lengths[sequence] = start + count
            if samples:
                self._before = [*self._before, sequence]
        return StepWork(sequences=tuple(rows))


def plan_of(work: StepWork, step: int) -> StepPlan:
    decodes = work.forward_mode in (ForwardMode.DECODE, ForwardMode.IDLE)
    bucket = min(size for size in (BUCKETS if decodes else PREFILL_BUCKETS) if size >= work.num_tokens)
    return StepPlan(
        step=step,
        eplb_pass=step,
        live_tokens=(work.num_tokens,),
        padded_tokens=(bucket,),
        padding_mode=PaddingMode.MAX_LEN,
        forward_mode=work.forward_mode,
        dispatch_mode=DispatchMode.NORMAL,
        overlap=False,
        overlap_reason="",
        bucket=bucket,
    )


def logits(runner: ModelRunner, graphs: StepGraphs, work: StepWork, step: int) -> torch.Tensor:
    runner.graphs = graphs
    plan = plan_of(work, step)
    return runner.launch(plan, runner.build(work, plan), None, is_counted=True).logits.clone()


@torch.inference_mode()
def test_captured_steps_of_changing_size_equal_the_same_passes_run_one_operation_at_a_time(built: BuiltRunner) -> None:
    runner = built.runner
    captured, repeated = (graphs_of(runner, is_captured=is_captured) for is_captured in (True, False))
    sequences = Sequences(0, 96)
    for step in range(STEPS):
        work = sequences.step_with_prompts() if step % 3 == 2 else sequences.step()
        before = runner.sampled.clone()
        got = logits(runner, captured, work, step)
        got_ids = runner.sampled[: work.num_samples].clone()
        runner.sampled.copy_(before)
        want = logits(runner, repeated, work, step)
        assert torch.equal(got, want), f"step {step} with {work.num_tokens} rows"
        assert torch.equal(got_ids, runner.sampled[: work.num_samples])
        assert torch.equal(got_ids, got.argmax(dim=-1))


def swap_slots(built: BuiltRunner, row: int, first: int, second: int) -> None:
    """Moves two experts into each other's places, as a rebalance does between two steps."""
    assert built.moe is not None
    maps, tensors = built.moe.maps, built.model.expert_tensors()[row]
    for tensor in tensors.tensors.values():
        kept = tensor[first].clone()
        tensor[first].copy_(tensor[second])
        tensor[second].copy_(kept)
    slots = maps.physical_to_logical.cpu().numpy().copy()
    slots[row, [first, second]] = slots[row, [second, first]]
    new = Placement.from_physical(slots, maps.logical_to_physical.shape[1])
    built.moe.experts.refresh(tensors.layer, [first, second])
    overwrite_layer(maps, row, new)
    built.moe.picker.placement_changed(row)


@torch.inference_mode()
def test_a_rebalance_between_two_replays_changes_nothing_but_the_loads(built: BuiltRunner) -> None:
    runner, recorder = built.runner, built.recorder
    assert recorder is not None
    assert built.moe is not None
    graphs = graphs_of(runner, is_captured=True)
    sequences = Sequences(1, 96)
    for step in range(3):
        logits(runner, graphs, sequences.step(), step)
    rows_of_all = sequences.step(max(BUCKETS)).sequences
    work = StepWork(
        sequences=tuple(
            msgspec.structs.replace(rows, tokens=(7 + place,), source=-1) for place, rows in enumerate(rows_of_all)
        )
    )
    seen: list[tuple[torch.Tensor, np.ndarray, np.ndarray]] = []
    for turn in range(2):
        counts: list[torch.Tensor] = []
        recorder.start()
        sink = CountSink(counts)
        recorder.add_sink(sink)
        out = logits(runner, graphs, work, 100 + turn)
        logical = recorder.logical_counts(local_comms().world).cpu().numpy()
        seen.append((out, counts[-1].cpu().numpy(), logical.sum(axis=0)))
        if turn == 0:
            assert counts[-1].sum() == work.num_tokens * 2 * 2, "2 layers, top-2"
            busiest = [int(row.argmax()) for row in counts[-1]]
            for row, slot in enumerate(busiest):
                recorder.flush_layer(row)
                swap_slots(built, row, slot, (slot + 1) % SLOTS)
    (before, loads, logical), (after, new_loads, new_logical) = seen
    torch.testing.assert_close(before, after, rtol=0, atol=TOLERANCE)
    assert (loads != new_loads).any()
    assert (logical == new_logical).all()


@attrs.frozen(eq=False)
class CountSink:
    counts: list[torch.Tensor]

    def push(self, counts: torch.Tensor) -> None:
        self.counts.append(counts.clone())

    def flush_layer(self, layer: int) -> None:
        """Counts stay physical here."""
