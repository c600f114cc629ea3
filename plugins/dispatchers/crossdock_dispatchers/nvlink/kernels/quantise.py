"""Block quantisation of the wire: float8_e4m3fn with one float32 scale per 128 elements."""

from __future__ import annotations

import torch

FP8_MAX = 448.0
"""Largest finite float8_e4m3fn."""
BLOCK_ELEMENTS = 128
SCALE_FLOOR = 1e-10
"""Keeps an all-zero block from dividing by zero; far below any activation."""


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, H] floating -> ([n, H] float8_e4m3fn, [n, H / 128] float32); ``H % 128 == 0``."""
    num_rows, hidden_size = rows.shape
    blocks = rows.float().view(num_rows, hidden_size // BLOCK_ELEMENTS, BLOCK_ELEMENTS)
    scales = blocks.abs().amax(dim=2).clamp_min(SCALE_FLOOR) / FP8_MAX
    return (blocks / scales.unsqueeze(2)).view(num_rows, hidden_size).to(torch.float8_e4m3fn), scales
