"""Readable truth of ``put_rows``: what every rank's receive buffers hold once all ranks have put their rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from crossdock.ops.quantise_rows_torch import quantise_rows_torch


def put_rows_torch(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    peers: Sequence[dict[str, torch.Tensor]],
    rank: int,
    bucket: int,
    slots_per_rank: int,
) -> None:
    """Puts one rank's rows into the buffers of all ranks; arguments as in ``put_rows``."""
    num_rows = hidden.shape[0]
    block = slice(rank * bucket, (rank + 1) * bucket)
    for destination, buffers in enumerate(peers):
        local = topk_ids - destination * slots_per_rank
        here = (topk_ids >= 0) & (local >= 0) & (local < slots_per_rank)
        ids = buffers["ids"][block]
        ids.fill_(-1)
        ids[:num_rows] = torch.where(here, local, -1)
        buffers["weights"][block][:num_rows] = topk_weights
        sent = here.any(dim=1)
        if "scales" in buffers:
            payload, scales = quantise_rows_torch(hidden)
            buffers["rows"][block][:num_rows].view(torch.uint8)[sent] = payload.view(torch.uint8)[sent]
            buffers["scales"][block][:num_rows][sent] = scales[sent]
        else:
            buffers["rows"][block][:num_rows][sent] = hidden[sent].to(buffers["rows"].dtype)
