"""Computes one rank's batches: attention plan, forward pass, and on the leader the sampling."""

from __future__ import annotations

import attrs
import torch

from crossdock.batch_build import HostBatch, build_batch, upload_batch
from crossdock.choose_tokens import StepChoice, choose, takes_best, with_scores
from crossdock.engine_seams import InFlight
from crossdock.executor import Executor
from crossdock.micro_batches import ContextMaker
from crossdock.observe.recorder import ExpertLoadRecorder
from crossdock.observe.timeline import Timeline
from crossdock.scheduled import Scheduled, StepTokens
from crossdock.split import merge_logits
from crossdock.step_graphs import StepGraphs
from crossdock.step_work import StepWork
from crossdock.types.attention import Attention
from crossdock.types.comm import GroupComm
from crossdock.types.layout import FULL_ROWS, Layout
from crossdock.types.parallel import ParallelSizes, RankPlace
from crossdock.types.step import StepPlan
from crossdock.types.strategy import OverlapLimits


@attrs.define(kw_only=True, eq=False)
class ModelRunner:
    """A ``StepRunner`` over a built model. Passes run in the order of their launches; ids stay on the device until ``collect``."""

    sizes: ParallelSizes
    place: RankPlace
    device: torch.device
    page_tokens: int
    executor: Executor
    attention: Attention
    sampled: torch.Tensor
    """[most] int64 on the device: the ids of the last launch, which the next one may continue with."""
    recorder: ExpertLoadRecorder | None
    """None for a dense model or with recording off."""
    dispatch_rows: Layout = FULL_ROWS
    """Layout of the rows that the dispatcher takes."""
    peers: GroupComm | None = None
    """The attention-TP group, where its ranks need the leader's ids on the device; None for one rank, and at depth 0."""
    eos_token_ids: frozenset[int] = frozenset()
    graphs: StepGraphs | None = None
    """Captured decode sizes; None where steps are not captured."""
    overlap: OverlapLimits = attrs.field(factory=OverlapLimits)
    """Where batches are cut in overlapped steps."""
    communication_sms: int = 0
    """SMs that the dispatcher's kernels use."""
    timeline: Timeline | None = None
    """Told of each pass; None while the rank warms up."""

    def build(self, work: StepWork, plan: StepPlan) -> HostBatch:
        return build_batch(work, plan, attn_dp_rank=self.place.attn_dp_rank, page_tokens=self.page_tokens)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, batch: HostBatch, scheduled: Scheduled | None, *, is_counted: bool) -> InFlight:
        is_captured = plan.bucket is not None and self.graphs is not None
        logits = (self._captured_logits if is_captured else self._eager_logits)(plan, batch, is_counted=is_counted)
        if self.timeline is not None:
            self.timeline.pass_launched()
        choice = None
        if scheduled is not None:
            has_best = is_captured and not plan.overlap and takes_best(scheduled)
            choice = self._choice(logits, scheduled, batch.num_samples, has_best=has_best)
        if self.peers is not None and batch.num_samples:
            own = self.sampled[: batch.num_samples]
            own.copy_(self.peers.broadcast(own, 0))
        return InFlight(scheduled=scheduled, logits=logits, choice=choice)

    def _choice(self, logits: torch.Tensor, scheduled: Scheduled, count: int, *, has_best: bool) -> StepChoice:
        """The choice, with its ids in ``sampled``; ``has_best``: a replay has put them there already."""
        if has_best:
            return with_scores(self.sampled[:count], logits, scheduled)
        choice = choose(logits, scheduled, self.eos_token_ids)
        self.sampled[:count].copy_(choice.ids)
        return choice

    def _captured_logits(self, plan: StepPlan, batch: HostBatch, *, is_counted: bool) -> torch.Tensor:
        assert self.graphs is not None, "a step has a bucket only where passes are captured"
        if self.timeline is not None:
            # A replay is one operation for the host: it is timed as a whole only.
            self.timeline.begin_pass(plan.step)
        if self.recorder is not None:
            self.recorder.begin_pass(plan.eplb_pass, record=is_counted)
        logits = self.graphs.logits(plan, batch)
        if self.recorder is not None:
            self.recorder.end_pass()
        return logits

    def _eager_logits(self, plan: StepPlan, host_batch: HostBatch, *, is_counted: bool) -> torch.Tensor:
        batch = upload_batch(host_batch, plan, self.sampled)
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
        tokens = StepTokens(token_ids=()) if in_flight.choice is None else in_flight.choice.read()
        if self.timeline is not None:
            self.timeline.end_pass()
        return tokens
