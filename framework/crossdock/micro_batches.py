"""From a batch and its plan to what the executor runs: one context, or two of an overlapped step, each with its own slot and attention plan."""

from __future__ import annotations

import attrs
import torch

from crossdock.dispatch_layout import dispatch_step
from crossdock.errors import BatchSplitError
from crossdock.split import split_batch
from crossdock.split_point import child_plans, split_point
from crossdock.types.attention import Attention
from crossdock.types.batch import ForwardBatch
from crossdock.types.layout import FULL_ROWS, Layout
from crossdock.types.model import ForwardContext
from crossdock.types.parallel import ParallelSizes
from crossdock.types.strategy import OverlapLimits, StagePlan


@attrs.frozen(kw_only=True, eq=False)
class ContextMaker:
    """What contexts of one rank are made with."""

    attention: Attention
    sizes: ParallelSizes
    dispatch_rows: Layout = FULL_ROWS
    """Layout of the rows that the dispatcher takes."""
    overlap: OverlapLimits = attrs.field(factory=OverlapLimits)
    communication_sms: int = 0
    """SMs that the dispatcher's kernels use."""

    def contexts(self, batch: ForwardBatch, stages: StagePlan) -> list[ForwardContext]:
        """One context a micro-batch, in order."""
        parts = micro_batches(batch, self.sizes, self.overlap)
        budget = None if len(parts) == 1 else sm_budget(stages, self.communication_sms, batch.input_ids.device)
        return [
            ForwardContext(
                batch=part,
                attn_metadata=self.attention.plan(part),
                dispatch_step=dispatch_step(part.step, self.dispatch_rows, self.sizes),
                slot=slot,
                sm_budget=budget,
            )
            for slot, part in enumerate(parts)
        ]


def micro_batches(batch: ForwardBatch, sizes: ParallelSizes, limits: OverlapLimits) -> tuple[ForwardBatch, ...]:
    """The batch itself, or its two parts in an overlapped step. The cut is that of the replica's vote, because it follows from the same lengths.

    Raises:
        BatchSplitError: the plan overlaps a batch that cannot be cut, or a field refuses.
    """
    if not batch.step.overlap:
        return (batch,)
    point = split_point(batch.forward_mode, batch.query_lens, limits.balance_threshold)
    if point is None:
        raise BatchSplitError(
            f"step {batch.step.step} overlaps, but rows of lengths {list(batch.query_lens)} cannot be cut in two; "
            "the replica should have voted against it"
        )
    return split_batch(batch, point, child_plans(batch.step, sizes))


def sm_budget(stages: StagePlan, communication_sms: int, device: torch.device) -> int | None:
    """SMs that experts may use beside communication; None for all of them, and where there are none."""
    if device.type != "cuda":
        return None
    most = int(torch.cuda.get_device_properties(device).multi_processor_count)
    budget = int(most * stages.compute_sm_fraction) - communication_sms * stages.spares_communication_sms
    return None if budget >= most else max(budget, 1)
