"""Readable truth of ``prefill``: one causal softmax a sequence and head, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def prefill_torch(
    q: torch.Tensor,
    contexts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    rows: Sequence[tuple[int, int]],
    out: torch.Tensor,
    scale: float,
) -> None:
    """``contexts``: keys [L, key heads, D] and values [L, key heads, Dv] of each sequence; ``rows``: its half-open query rows in ``q``."""
    for (keys, values), (start, stop) in zip(contexts, rows, strict=True):
        group = q.shape[1] // keys.shape[1]
        wide_keys = keys.float().repeat_interleave(group, dim=1)
        wide_values = values.float().repeat_interleave(group, dim=1)
        scores = torch.einsum("nhd,lhd->hnl", q[start:stop].float(), wide_keys) * scale
        prefix = keys.shape[0] - (stop - start)
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(prefix + 1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        out[start:stop] = torch.einsum("hnl,lhd->nhd", weights, wide_values).to(out.dtype)
