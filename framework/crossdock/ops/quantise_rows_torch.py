"""Quantisation by blocks of a row in torch operators: the readable truth."""

from __future__ import annotations

import torch

from crossdock.ops.fp8_block_torch import BLOCK, FP8_MAX

SCALE_FLOOR = 1e-10
"""Keeps an all-zero block from dividing by zero; far below any activation."""


def quantise_rows_torch(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``crossdock.ops.quantise_rows.quantise_rows``."""
    blocks = rows.float().unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(dim=-1).clamp_min(SCALE_FLOOR) / FP8_MAX
    return (blocks / scales.unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn), scales
