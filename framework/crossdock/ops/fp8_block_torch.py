"""Block quantisation in torch."""

from __future__ import annotations

import torch

BLOCK = 128
"""Rows and columns that share a scale."""
FP8_MAX = 448.0
"""Largest finite float8_e4m3fn."""


def dequantise_blocks_torch(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, first_row: int, first_col: int
) -> torch.Tensor:
    """Every element times the scale of its block, in float32, then cast."""
    rows = torch.arange(first_row, first_row + weight.shape[0], device=weight.device) // BLOCK
    cols = torch.arange(first_col, first_col + weight.shape[1], device=weight.device) // BLOCK
    per_column = scale.float().index_select(1, cols)
    return weight.float().mul_(per_column.index_select(0, rows)).to(dtype)


def quantise_blocks_torch(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale of a block = its largest magnitude / 448; an all-zero block gets scale 1."""
    rows, cols = weight.shape
    row_blocks, col_blocks = -(-rows // BLOCK), -(-cols // BLOCK)
    padded = torch.nn.functional.pad(weight.float(), (0, col_blocks * BLOCK - cols, 0, row_blocks * BLOCK - rows))
    blocks = padded.view(row_blocks, BLOCK, col_blocks, BLOCK)
    largest = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(largest > 0, largest / FP8_MAX, torch.ones_like(largest))
    quantised = (blocks / scale[:, None, :, None]).view(row_blocks * BLOCK, col_blocks * BLOCK)[:rows, :cols]
    return quantised.to(torch.float8_e4m3fn), scale
