"""Computes one rank's batches: attention plan, forward pass, and on the leader the sampling."""

from __future__ import annotations

import attrs
import torch

from crossdock.batch_build import build_batch
from crossdock.choose_tokens import read_tokens, sample_step
from crossdock.decode_graphs import DecodeGraphs
from crossdock.engine_seams import InFlight
from crossdock.executor import Executor
from crossdock.micro_batches import ContextMaker
from crossdock.observe.timeline import Timeline
from crossdock.recorder import ExpertLoadRecorder
from crossdock.scheduled import Scheduled, StepTokens
from crossdock.split import merge_logits
from crossdock.step_work import StepWork
from crossdock.types.attention import Attention
from crossdock.types.batch import ForwardBatch
from crossdock.types.layout import FULL_ROWS, Layout
from crossdock.types.parallel import ParallelSizes, RankPlace
from crossdock.types.step import StepPlan
from crossdock.types.strategy import OverlapLimits


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
    overlap: OverlapLimits = attrs.field(factory=OverlapLimits)
    """Where batches are cut in overlapped steps."""
    communication_sms: int = 0
    """SMs that the dispatcher's kernels use."""
    timeline: Timeline | None = None
    """Told of each pass; None while the rank warms up."""

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
            # A replay is one operation for the host: it is timed as a whole only.
            if self.timeline is not None:
                self.timeline.begin_pass(plan.step)
            logits = self.graphs.logits(plan, batch)
        else:
            logits = self._eager_logits(plan, batch, is_counted=is_counted)
        ids = None if scheduled is None else sample_step(logits, scheduled, self.eos_token_ids)
        return InFlight(scheduled=scheduled, logits=logits, ids=ids)

    def _eager_logits(self, plan: StepPlan, batch: ForwardBatch, *, is_counted: bool) -> torch.Tensor:
        maker = ContextMaker(
            attention=self.attention,
            sizes=self.sizes,
            dispatch_rows=self.dispatch_rows,
            overlap=self.overlap,
            communication_sms=self.communication_sms,
        )
        marks = None if self.timeline is None else self.timeline.begin_pass(plan.step)
        contexts = maker.contexts(batch, self.executor.plan(plan.forward_mode))
        if self.recorder is not None:
            self.recorder.begin_pass(plan.eplb_pass, record=is_counted, batch=batch)
        parts = self.executor.run(contexts, marks)
        if self.recorder is not None:
            self.recorder.end_pass()
        return parts[0] if len(parts) == 1 else merge_logits(parts)

    @torch.inference_mode()
    def collect(self, in_flight: InFlight) -> StepTokens:
        tokens = StepTokens(token_ids=())
        if in_flight.scheduled is not None and in_flight.ids is not None:
            tokens = read_tokens(in_flight.logits, in_flight.ids, in_flight.scheduled)
        if self.timeline is not None:
            self.timeline.end_pass()
        return tokens
