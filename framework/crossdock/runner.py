"""Computes one rank's batches: attention plan, forward pass, and on the leader the sampling."""

from __future__ import annotations

import attrs
import torch

from crossdock.batch_build import build_batch
from crossdock.choose_tokens import read_tokens, sample_step
from crossdock.decode_graphs import DecodeGraphs
from crossdock.dispatch_layout import dispatch_step
from crossdock.engine_seams import InFlight
from crossdock.executor import Executor
from crossdock.recorder import ExpertLoadRecorder
from crossdock.scheduled import Scheduled, StepTokens
from crossdock.step_work import StepWork
from crossdock.types.attention import Attention
from crossdock.types.batch import ForwardBatch
from crossdock.types.layout import FULL_ROWS, Layout
from crossdock.types.model import ForwardContext
from crossdock.types.parallel import ParallelSizes, RankPlace
from crossdock.types.step import StepPlan


@attrs.define(kw_only=True, eq=False)
class ModelRunner:
    """A ``StepRunner`` over a built model. One forward pass at a time; ids may stay on the device until ``collect``."""

    sizes: ParallelSizes
    place: RankPlace
    device: torch.device
    page_tokens: int
    executor: Executor
    attention: Attention
    recorder: ExpertLoadRecorder | None
    """None for a dense model or with recording off."""
    dispatch_rows: Layout = FULL_ROWS
    """Layout of the rows that the dispatcher takes."""
    eos_token_ids: frozenset[int] = frozenset()
    graphs: DecodeGraphs | None = None
    """Captured decode sizes; None where steps are not captured."""

    def build(self, work: StepWork, plan: StepPlan) -> ForwardBatch:
        return build_batch(
            work,
            plan,
            attn_dp_rank=self.place.attn_dp_rank,
            page_tokens=self.page_tokens,
            device=self.device,
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan, batch: ForwardBatch, scheduled: Scheduled | None, *, is_counted: bool) -> InFlight:
        if plan.bucket is not None and self.graphs is not None:
            logits = self.graphs.logits(plan, batch)
        else:
            logits = self._eager_logits(plan, batch, is_counted=is_counted)
        ids = None if scheduled is None else sample_step(logits, scheduled, self.eos_token_ids)
        return InFlight(scheduled=scheduled, logits=logits, ids=ids)

    def _eager_logits(self, plan: StepPlan, batch: ForwardBatch, *, is_counted: bool) -> torch.Tensor:
        context = ForwardContext(
            batch=batch,
            attn_metadata=self.attention.plan(batch),
            dispatch_step=dispatch_step(plan, self.dispatch_rows, self.sizes),
        )
        if self.recorder is not None:
            self.recorder.begin_pass(plan.eplb_pass, record=is_counted, batch=batch)
        (logits,) = self.executor.run([context])
        if self.recorder is not None:
            self.recorder.end_pass()
        return logits

    @torch.inference_mode()
    def collect(self, in_flight: InFlight) -> StepTokens:
        if in_flight.scheduled is None or in_flight.ids is None:
            return StepTokens(token_ids=())
        return read_tokens(in_flight.logits, in_flight.ids, in_flight.scheduled)
