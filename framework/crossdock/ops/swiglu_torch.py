"""Gated activation in torch."""

from __future__ import annotations

import torch
from torch.nn import functional


def swiglu_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """Works in the gate's storage, which nobody reads afterwards: one buffer less for each feed-forward block."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate, inplace=True).mul_(up)
