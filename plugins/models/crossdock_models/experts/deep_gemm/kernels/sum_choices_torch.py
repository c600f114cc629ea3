"""Readable truth of ``sum_choices``."""

from __future__ import annotations

import torch


def sum_choices_torch(out: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """See ``crossdock_models.experts.deep_gemm.kernels.sum_choices.sum_choices``; float32."""
    total = torch.zeros(positions.shape[0], out.shape[1], dtype=torch.float32, device=out.device)
    for k in range(positions.shape[1]):
        live = (positions[:, k] >= 0).nonzero().flatten()
        total.index_add_(0, live, out[positions[live, k].long()].float() * weights[live, k, None])
    return total
