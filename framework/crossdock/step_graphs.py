"""Steps as device graphs: one captured forward pass a bucket, replayed by every replica, idle ones too (DESIGN section 5).
Where a strategy overlaps decode steps, a bucket has a second graph, of its two halves. Small steps with prompt tokens have buckets of
their own, in which each row is a sequence that ends with it: the pass of a decode step whose rows see one another.

A step is one upload, one replay, and the copy of its ids: the pass begins by unpacking the upload into the bucket's tensors, which keep
their addresses, and ends with the likeliest token of each row. The device is told by ``DispatchStep.padded_rows`` which rows carry no
token, so that nothing inside depends on counts of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import torch

from crossdock.batch_build import HostBatch
from crossdock.dispatch_layout import dispatch_step
from crossdock.executor import Executor
from crossdock.micro_batches import sm_budget
from crossdock.observe.recorder import ExpertLoadRecorder
from crossdock.ops.unpack_step import StepTensors, packed_ints, unpack_step
from crossdock.row_mask import rows_in
from crossdock.split_point import child_plans
from crossdock.step_upload import StepUpload
from crossdock.types.attention import CapturableAttention
from crossdock.types.batch import ForwardBatch
from crossdock.types.layout import Layout
from crossdock.types.model import ForwardContext
from crossdock.types.parallel import ParallelSizes, RankPlace
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan

CAPTURE_STEP = -1


class Capturer(Protocol):
    """Turns a computation over fixed tensors into something that repeats it."""

    def capture(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Runs ``compute`` at least once. Returns how to repeat it, and the tensor that each repetition fills."""
        ...


class CudaCapturer:
    """CUDA graphs that share one memory pool: only one of them runs at a time, and the largest is captured first."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        # Once outside: kernels are compiled and loaded, library handles made. Neither may happen while a stream is captured.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            compute()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = compute()
        self._pool = graph.pool()
        return graph.replay, result


@attrs.frozen(kw_only=True, eq=False)
class _Pass:
    """The captured pass of a bucket."""

    replay: Callable[[], None]
    logits: torch.Tensor
    """[rows of the first micro-batch and of the next, V] float32; with prompt tokens as many as can be sampled."""
    parts: Sequence[tuple[ForwardContext, StepTensors]]
    """A graph knows addresses only: who has it must keep what it reads."""


@attrs.define(kw_only=True, eq=False)
class StepGraphs:
    """The captured sizes of one rank."""

    executor: Executor
    attention: CapturableAttention
    sizes: ParallelSizes
    place: RankPlace
    device: torch.device
    dispatch_rows: Layout
    dispatch_mode: DispatchMode
    padding_mode: PaddingMode
    page_tokens: int
    max_sequence_tokens: int
    """Tokens of the longest sequence: page tables and rotary tables are as long as it needs from the start."""
    capturer: Capturer
    sampled: torch.Tensor
    """[most] int64: the ids of the step before, for pending tokens; a replay leaves the likeliest token of each of its rows here."""
    communication_sms: int = 0
    """SMs that the dispatcher's kernels use."""
    recorder: ExpertLoadRecorder | None = None
    """Counts loads inside the captured passes."""
    _uploads: tuple[StepUpload, ...] = attrs.field(default=(), init=False)
    """One a micro-batch; all buckets share them."""
    _passes: dict[tuple[int, bool], _Pass] = attrs.field(factory=dict["tuple[int, bool]", "_Pass"], init=False)
    """By rows and by whether the step overlaps."""
    _prefill_passes: dict[int, _Pass] = attrs.field(factory=dict[int, _Pass], init=False)
    """By rows."""

    def capture(
        self, captured_rows: Sequence[int], overlapped_rows: Sequence[int] = (), prefill_rows: Sequence[int] = ()
    ) -> None:
        """Captures every size, the largest first. Collective: all ranks call it with the same sizes.

        Args:
            captured_rows: rows of a replica.
            overlapped_rows: those that are captured in two micro-batches, too.
            prefill_rows: of steps with prompt tokens; the backend must have ``prefill_capture``.
        """
        most = max((*captured_rows, *prefill_rows))
        dispatch_rows = rows_in(self.dispatch_rows, self._plan(most), self.sizes, self.place)
        sequences = max(max(captured_rows), self.sampled.shape[0])
        length = packed_ints(most, dispatch_rows, self._num_logits(most), sequences * self._columns)
        self._uploads = tuple(
            StepUpload.make(length, self.device, self.dispatch_rows, self.sizes, self.place) for _ in range(2)
        )
        for rows in sorted(prefill_rows, reverse=True):
            self._prefill_passes[rows] = self._capture(self._plan(rows, ForwardMode.PREFILL))
        for rows in sorted(captured_rows, reverse=True):
            for is_overlapped in (False, True) if rows in overlapped_rows else (False,):
                self._passes[rows, is_overlapped] = self._capture(self._plan(rows, is_overlapped=is_overlapped))

    def logits(self, plan: StepPlan, batch: HostBatch) -> torch.Tensor:
        """Replays ``plan.bucket`` on a batch padded to it: [R, V] float32 for the batch's logit rows, overwritten by the next replay."""
        assert plan.bucket is not None, "an eager step has no bucket"
        if has_prompt_tokens(plan):
            captured = self._prefill_passes[plan.bucket]
            self._uploads[0].send(batch, plan, 0, batch.num_live, captured.logits.shape[0])
            captured.replay()
            return captured.logits[: len(batch.logit_rows)]
        captured = self._passes[plan.bucket, plan.overlap]
        if not plan.overlap:
            self._uploads[0].send(batch, plan, 0, batch.num_live)
            captured.replay()
            # Decode: one row a sequence, live rows first, so the logit rows are the first ones.
            return captured.logits[: batch.num_live]
        cut = plan.overlap_rows[self.place.attn_dp_rank]
        plans = child_plans(plan, self.sizes)
        for upload, child, (first, stop) in zip(self._uploads, plans, ((0, cut), (cut, batch.num_live)), strict=True):
            upload.send(batch, child, first, stop)
        captured.replay()
        second = plans[0].padded_tokens[self.place.attn_dp_rank]
        return torch.cat((captured.logits[:cut], captured.logits[second : second + batch.num_live - cut]))

    @property
    def _columns(self) -> int:
        return -(-self.max_sequence_tokens // self.page_tokens)

    def _capture(self, plan: StepPlan) -> _Pass:
        plans = child_plans(plan, self.sizes) if plan.overlap else (plan,)
        budget = None
        if plan.overlap:
            budget = sm_budget(self.executor.plan(plan.forward_mode), self.communication_sms, self.device)
        parts = [self._part(child, slot, budget) for slot, child in enumerate(plans)]

        def compute() -> torch.Tensor:
            for upload, (_, tensors) in zip(self._uploads, parts, strict=False):
                unpack_step(upload.packed, self.sampled, tensors)
            first, *others = self.executor.run([context for context, _ in parts])
            if others:
                return torch.cat((first, *others))
            self.sampled[: first.shape[0]].copy_(first.argmax(dim=-1))
            return first

        if self.recorder is not None:
            self.recorder.begin_capture()
        replay, logits = self.capturer.capture(compute)
        if self.recorder is not None:
            self.recorder.end_capture()
        return _Pass(replay=replay, logits=logits, parts=parts)

    def _part(self, plan: StepPlan, slot: int, budget: int | None) -> tuple[ForwardContext, StepTensors]:
        """One micro-batch's context and the tensors in it that each step fills."""
        assert plan.bucket is not None, "only buckets are captured"
        batch = self._batch(plan.bucket, plan)
        num_rows = rows_in(self.dispatch_rows, plan, self.sizes, self.place)
        padded_rows = torch.ones(num_rows, 1, dtype=torch.bool, device=self.device)
        if has_prompt_tokens(plan):
            tables = self.attention.allocate_buffers(plan.bucket, self._columns, shares_contexts=True)
            chosen = torch.zeros(self._num_logits(plan.bucket), dtype=torch.int64, device=self.device)
            batch = attrs.evolve(batch, logit_rows=chosen)
        else:
            tables = self.attention.allocate_buffers(plan.bucket, self._columns)
            chosen = batch.logit_rows[:0]
        context = ForwardContext(
            batch=batch,
            attn_metadata=self.attention.plan(batch, tables),
            dispatch_step=attrs.evolve(dispatch_step(plan, self.dispatch_rows, self.sizes), padded_rows=padded_rows),
            slot=slot,
            sm_budget=budget,
        )
        return context, StepTensors(
            input_ids=batch.input_ids,
            positions=batch.positions,
            kv_slots=batch.kv_slots,
            seq_lens=tables.seq_lens,
            page_table=tables.page_table,
            padded_rows=padded_rows,
            logit_rows=chosen,
        )

    def _num_logits(self, rows: int) -> int:
        """Rows with logits in a step with prompt tokens: one for each sequence that samples."""
        return min(rows, self.sampled.shape[0])

    def _plan(self, rows: int, mode: ForwardMode = ForwardMode.DECODE, *, is_overlapped: bool = False) -> StepPlan:
        return StepPlan(
            step=CAPTURE_STEP,
            eplb_pass=0,
            live_tokens=(rows,) * self.sizes.attn_dp_size,
            padded_tokens=(rows,) * self.sizes.attn_dp_size,
            padding_mode=self.padding_mode,
            forward_mode=mode,
            dispatch_mode=self.dispatch_mode,
            overlap=is_overlapped,
            overlap_reason="" if is_overlapped else "capture",
            bucket=rows,
            overlap_rows=(rows // 2,) * self.sizes.attn_dp_size if is_overlapped else (),
        )

    def _batch(self, rows: int, plan: StepPlan) -> ForwardBatch:
        """Rows that write to the scratch page and read nothing else, as long as a sequence can be."""
        zeros = torch.zeros(rows, dtype=torch.int64, device=self.device)
        return ForwardBatch(
            input_ids=zeros,
            positions=zeros.clone(),
            kv_slots=zeros.clone(),
            page_table=torch.zeros(rows, 1, dtype=torch.int32, device=self.device),
            seq_lens=(self.max_sequence_tokens,) * rows,
            query_lens=(1,) * rows,
            logit_rows=torch.arange(rows, device=self.device),
            forward_mode=ForwardMode.DECODE,
            step=plan,
            attn_dp_rank=self.place.attn_dp_rank,
            num_live_tokens=rows,
        )


def has_prompt_tokens(plan: StepPlan) -> bool:
    """Some replica brings more than one row of a sequence, or the first token's."""
    return plan.forward_mode in (ForwardMode.PREFILL, ForwardMode.MIXED)
