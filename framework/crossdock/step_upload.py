"""A captured step's way to the device: packed into host memory, one copy, unpacked by the first kernel of the graph."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from crossdock.batch_build import HostBatch
from crossdock.ops.unpack_step import pack_step
from crossdock.row_mask import live_mask
from crossdock.types.layout import Layout
from crossdock.types.parallel import ParallelSizes, RankPlace
from crossdock.types.step import StepPlan


@attrs.frozen(kw_only=True, eq=False)
class StepUpload:
    """Uploads of one micro-batch, at one fixed address on the device."""

    packed: torch.Tensor
    """[length] int32 on the device."""
    staging: list[tuple[torch.Tensor, torch.cuda.Event | None]]
    """Host memory, pinned where there is a device, and when its last copy was done; used in turn."""
    dispatch_rows: Layout
    sizes: ParallelSizes
    place: RankPlace

    @staticmethod
    def make(
        length: int, device: torch.device, dispatch_rows: Layout, sizes: ParallelSizes, place: RankPlace
    ) -> StepUpload:
        """Memory for ``length`` integers, all zero."""
        on_gpu = device.type == "cuda"
        return StepUpload(
            packed=torch.zeros(length, dtype=torch.int32, device=device),
            # Two, because the copy of one step may still wait for the device when the next one is written.
            staging=[
                (torch.zeros(length, dtype=torch.int32, pin_memory=on_gpu), torch.cuda.Event() if on_gpu else None)
                for _ in range(2)
            ],
            dispatch_rows=dispatch_rows,
            sizes=sizes,
            place=place,
        )

    def send(self, batch: HostBatch, plan: StepPlan, first: int, stop: int, num_logits: int = 0) -> None:
        """Copies rows ``first`` to ``stop`` of a batch, in the order of the stream. Each row is taken as a sequence that ends with it.

        ``plan``: of this micro-batch; its bucket is the size of the captured pass. ``num_logits``: rows of which the pass computes logits,
        where it is told which ones.
        """
        assert plan.bucket is not None, "an eager step has no bucket"
        own = slice(first, stop)
        sequences = np.repeat(np.arange(len(batch.query_lens), dtype=np.int32), batch.query_lens)[own]
        pages = batch.page_table[sequences[0] : sequences[-1] + 1] if sequences.size else batch.page_table[:0]
        fields = (batch.token_ids, batch.sources, batch.positions, batch.kv_slots, batch.positions + 1)
        rows = np.stack([*(field[own] for field in fields), sequences - sequences[:1]])
        logit_rows = np.zeros(num_logits, dtype=np.int32)
        logit_rows[: len(batch.logit_rows)] = batch.logit_rows[:num_logits]
        padded = ~live_mask(self.dispatch_rows, plan, self.sizes, self.place).numpy()
        self.staging.reverse()
        memory, event = self.staging[0]
        if event is not None:
            event.synchronize()
        length = pack_step(rows, pages, padded, logit_rows, plan.bucket, memory.numpy())
        self.packed[:length].copy_(memory[:length], non_blocking=True)
        if event is not None:
            event.record()
