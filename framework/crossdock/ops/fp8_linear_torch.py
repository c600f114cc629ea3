"""Products with block-quantised weights in torch operators: the readable truth."""

from __future__ import annotations

import torch

from crossdock.ops.fp8_block_torch import dequantise_blocks_torch


def fp8_linear_torch(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[n, K] and [N, K] float8_e4m3fn with scales by block -> [n, N] in the dtype of ``rows``, summed in float32."""
    return (rows.float() @ dequantise_blocks_torch(weight, scale, torch.float32, 0, 0).T).to(rows.dtype)
