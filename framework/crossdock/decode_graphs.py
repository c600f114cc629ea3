"""Decode steps as device graphs: one captured forward pass a bucket, replayed by every replica, idle ones too (DESIGN section 5).

A bucket's tensors keep their addresses; a replay copies the batch into them. The device is told by ``DispatchStep.padded_rows`` which rows
carry no token, so that nothing inside depends on counts of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import torch

from crossdock.dispatch_layout import dispatch_step
from crossdock.executor import Executor
from crossdock.row_mask import live_mask, rows_in
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
class _Bucket:
    """Static tensors of one size, and the pass over them."""

    batch: ForwardBatch
    padded_rows: torch.Tensor
    buffers: Any
    replay: Callable[[], None]
    logits: torch.Tensor
    """[bucket, V] float32, row i of the batch."""


@attrs.define(kw_only=True, eq=False)
class DecodeGraphs:
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
    _buckets: dict[int, _Bucket] = attrs.field(factory=dict[int, "_Bucket"], init=False)

    def capture(self, captured_rows: Sequence[int]) -> None:
        """Captures every size, the largest first. Collective: all ranks call it with the same sizes."""
        for rows in sorted(captured_rows, reverse=True):
            self._buckets[rows] = self._capture(rows)

    def logits(self, plan: StepPlan, batch: ForwardBatch) -> torch.Tensor:
        """Replays ``plan.bucket`` on a batch padded to it: [R, V] float32 for the batch's logit rows, overwritten by the next replay."""
        assert plan.bucket is not None, "an eager step has no bucket"
        bucket = self._buckets[plan.bucket]
        self.attention.plan(batch, bucket.buffers)
        for static, live in (
            (bucket.batch.input_ids, batch.input_ids),
            (bucket.batch.positions, batch.positions),
            (bucket.batch.kv_slots, batch.kv_slots),
        ):
            static.copy_(live)
        bucket.padded_rows.copy_(~live_mask(self.dispatch_rows, plan, self.sizes, self.place).unsqueeze(1))
        bucket.replay()
        # Decode: one row a sequence, live rows first, so the logit rows are the first ones.
        return bucket.logits[: batch.logit_rows.shape[0]]

    def _capture(self, rows: int) -> _Bucket:
        plan = self._plan(rows)
        batch = self._batch(rows, plan)
        num_rows = rows_in(self.dispatch_rows, plan, self.sizes, self.place)
        padded_rows = torch.ones(num_rows, 1, dtype=torch.bool, device=self.device)
        columns = -(-self.max_sequence_tokens // self.page_tokens)
        buffers = self.attention.allocate_buffers(rows, columns)
        context = ForwardContext(
            batch=batch,
            attn_metadata=self.attention.plan(batch, buffers),
            dispatch_step=attrs.evolve(dispatch_step(plan, self.dispatch_rows, self.sizes), padded_rows=padded_rows),
        )
        replay, logits = self.capturer.capture(lambda: self.executor.run([context])[0])
        return _Bucket(batch=batch, padded_rows=padded_rows, buffers=buffers, replay=replay, logits=logits)

    def _plan(self, rows: int) -> StepPlan:
        return StepPlan(
            step=CAPTURE_STEP,
            eplb_pass=0,
            live_tokens=(rows,) * self.sizes.attn_dp_size,
            padded_tokens=(rows,) * self.sizes.attn_dp_size,
            padding_mode=self.padding_mode,
            forward_mode=ForwardMode.DECODE,
            dispatch_mode=self.dispatch_mode,
            overlap=False,
            overlap_reason="capture",
            bucket=rows,
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
