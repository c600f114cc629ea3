"""Root-mean-square norm in torch."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm_torch(hidden_states: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """[..., dim] -> [..., dim]; torch's own op already accumulates in float32 for bf16 rows."""
    return functional.rms_norm(hidden_states, hidden_states.shape[-1:], weight, eps)
