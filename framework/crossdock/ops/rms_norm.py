"""Root-mean-square norm over the last dimension."""

from __future__ import annotations

import torch

from crossdock.ops.norms_cpu import rms_norm_cpu, takes
from crossdock.ops.rms_norm_torch import rms_norm_torch


def rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x**2) + eps) * weight``, computed in float32 and returned in the input's dtype.

    Args:
        hidden_states: [..., dim] fp32 or bf16; zero rows are fine.
        weight: [dim], or None for a norm without one.
        eps: added to the mean of squares.

    Raises:
        ValueError: the weight does not have the last dimension's size.

    Source: Zhang and Sennrich 2019, as Llama-type models use it.
    """
    if weight is not None and weight.shape != hidden_states.shape[-1:]:
        raise ValueError(f"rms_norm: weight {tuple(weight.shape)} does not fit rows of {hidden_states.shape[-1]}")
    if hidden_states.dim() == 2 and takes(hidden_states, weight):
        return rms_norm_cpu(hidden_states, weight, eps)
    return rms_norm_torch(hidden_states, weight, eps)
