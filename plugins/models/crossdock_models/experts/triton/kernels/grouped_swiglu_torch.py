"""Readable truth of ``grouped_swiglu``: one loop over experts."""

from __future__ import annotations

import torch


def grouped_swiglu_torch(
    rows: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """See ``crossdock_models.experts.triton.kernels.grouped_swiglu.grouped_swiglu``; weights dequantised, float32 throughout."""
    total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    for expert in range(gate_up.shape[0]):
        row, k = (local_ids == expert).nonzero(as_tuple=True)
        gate, up = (rows[row].float() @ gate_up[expert].float().T).chunk(2, dim=1)
        part = (torch.nn.functional.silu(gate) * up) @ down[expert].float().T
        total.index_add_(0, row, part * weights[row, k, None])
    return total
