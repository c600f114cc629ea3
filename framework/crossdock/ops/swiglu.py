"""Gated activation of the feed-forward blocks: ``silu(gate) * up``."""

from __future__ import annotations

import torch

from crossdock.ops.swiglu_torch import swiglu_torch


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2I], gate half first -> [..., I], same dtype.

    Raises:
        ValueError: the last dimension is odd.

    Source: Shazeer 2020, "GLU variants improve transformer".
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"swiglu: last dimension {gate_up.shape[-1]} is odd; it holds gate and up halves")
    return swiglu_torch(gate_up)
