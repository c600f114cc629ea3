"""Readable truth of the products in float8: everything dequantised, float32 throughout, what lies between them quantised once."""

from __future__ import annotations

import torch
from crossdock.ops.fp8_block_torch import BLOCK
from crossdock.ops.quantise_rows_torch import quantise_rows_torch


def fp8_swiglu_torch(
    rows: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """As ``grouped_swiglu_torch``, rows [R, H] float32 quantised on the way in; gate_up [S, 2I, H] and down [S, H, I] dequantised."""
    total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    rows = dequantised_rows(*quantise_rows_torch(rows))
    for expert in range(gate_up.shape[0]):
        row, k = (local_ids == expert).nonzero(as_tuple=True)
        gate, up = (rows[row] @ gate_up[expert].float().T).chunk(2, dim=1)
        activated = dequantised_rows(*quantise_rows_torch(torch.nn.functional.silu(gate) * up))
        total.index_add_(0, row, activated @ down[expert].float().T * weights[row, k, None])
    return total


def dequantised_rows(payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[n, H] float8_e4m3fn and [n, H / 128] float32 -> [n, H] float32."""
    blocks: torch.Tensor = payload.float().unflatten(-1, (-1, BLOCK)) * scales.unsqueeze(-1)
    return blocks.flatten(-2)
