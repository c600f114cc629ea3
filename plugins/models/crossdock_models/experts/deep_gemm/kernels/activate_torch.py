"""Readable truth of ``swiglu_places`` and ``quantise_places``."""

from __future__ import annotations

import torch
from crossdock.ops.quantise_rows_torch import quantise_rows_torch


def swiglu_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """[P, 2I] -> [P, I] float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def quantised_swiglu_torch(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[P, 2I] -> [P, I] float8_e4m3fn and [P, I / 128] float32."""
    return quantise_rows_torch(swiglu_torch(gate_up))
