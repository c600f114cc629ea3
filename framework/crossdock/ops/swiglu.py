# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""Gated activation of the feed-forward blocks: ``silu(gate) * up``."""

from __future__ import annotations

import torch

from crossdock.ops.early_launch import early_launch
from crossdock.ops.swiglu_cpu import swiglu_cpu, takes
from crossdock.ops.swiglu_torch import swiglu_torch
from crossdock.ops.tile_size import block_of

COLUMNS = 1024
"""Columns a program takes at most."""


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2I], gate half first -> [..., I], same dtype.

    Raises:
        ValueError: the last dimension is odd.

    Source: Shazeer 2020, "GLU variants improve transformer".
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"swiglu: last dimension {gate_up.shape[-1]} is odd; it holds gate and up halves")
    if gate_up.is_cuda and gate_up.dim() == 2:
        return swiglu_fused(gate_up.contiguous())
    if takes(gate_up):
        return swiglu_cpu(gate_up)
    return swiglu_torch(gate_up)


def swiglu_fused(gate_up: torch.Tensor) -> torch.Tensor:
    """The kernel's form of ``swiglu``: [n, 2I] contiguous -> [n, I]; checked by the caller."""
    num_rows, inner_size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, inner_size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    # Imported at the first call: CPU installations have no triton.
    from crossdock.ops.swiglu_triton import swiglu_kernel

    block = min(COLUMNS, block_of(inner_size))
    swiglu_kernel[(num_rows, -(-inner_size // block))](
        gate_up, out, inner_size, block=block, num_warps=4, **early_launch(gate_up)
    )
    return out
