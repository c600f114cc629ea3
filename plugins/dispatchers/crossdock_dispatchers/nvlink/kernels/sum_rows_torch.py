"""Readable truth of ``sum_rows``: the weighted outputs of all ranks, summed in rank order in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sum_rows_torch(
    expert_outs: Sequence[torch.Tensor], topk_ids: torch.Tensor, rank: int, bucket: int, slots_per_rank: int
) -> torch.Tensor:
    """``expert_outs[r]`` [world * bucket, H] of every rank -> this rank's [n, H] in their dtype."""
    num_rows = topk_ids.shape[0]
    total = torch.zeros(num_rows, expert_outs[0].shape[1], dtype=torch.float32, device=topk_ids.device)
    for holder, out in enumerate(expert_outs):
        local = topk_ids - holder * slots_per_rank
        here = ((topk_ids >= 0) & (local >= 0) & (local < slots_per_rank)).any(dim=1)
        rows = out[rank * bucket : rank * bucket + num_rows].float()
        total += torch.where(here.unsqueeze(1), rows, torch.zeros_like(rows))
    return total.to(expert_outs[0].dtype)
