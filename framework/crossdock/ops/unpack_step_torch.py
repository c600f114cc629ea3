"""The readable form of ``unpack_step``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from crossdock.ops.unpack_step import StepTensors


def unpack_step_torch(packed: torch.Tensor, sampled: torch.Tensor, to: StepTensors) -> None:
    """See ``unpack_step``."""
    bucket, dispatch_rows = to.input_ids.shape[0], to.padded_rows.shape[0]
    width = int(packed[0])
    ids, sources, positions, slots, lengths, sequences = (
        packed[1 : 1 + 6 * bucket].to(torch.int64).view(6, bucket).unbind()
    )
    to.input_ids.copy_(torch.where(ids < 0, sampled[sources.clamp(min=0)], ids))
    to.positions.copy_(positions)
    to.kv_slots.copy_(slots)
    to.seq_lens.copy_(lengths)
    mask, logit_rows, pages = packed[1 + 6 * bucket :].tensor_split(
        [dispatch_rows, dispatch_rows + to.logit_rows.shape[0]]
    )
    to.padded_rows.copy_(mask.unsqueeze(1) != 0)
    to.logit_rows.copy_(logit_rows)
    live = int((lengths > 0).sum())
    of_row = sequences[:live, None] * width + torch.arange(width, device=pages.device)
    to.page_table[:live, :width].copy_(pages[of_row])
