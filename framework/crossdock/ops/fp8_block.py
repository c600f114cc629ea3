"""Weights in float8_e4m3fn with one float32 scale per 128 x 128 block (DeepSeek-V3's checkpoint form)."""

from __future__ import annotations

import torch

from crossdock.ops.fp8_block_torch import BLOCK, dequantise_blocks_torch, quantise_blocks_torch


def num_blocks(size: int) -> int:
    """Blocks along a dimension; the last one may be partly filled."""
    return -(-size // BLOCK)


def dequantise_blocks(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, first_row: int = 0, first_col: int = 0
) -> torch.Tensor:
    """A slice of a block-quantised matrix in a plain dtype.

    Args:
        weight: [rows, cols] float8_e4m3fn, any slice of the matrix.
        scale: float32 scales of the blocks that the slice touches, [block rows, block cols].
        dtype: of the result.
        first_row: row of the slice's first element inside its first block (0 when the slice starts on a block).
        first_col: the same for columns.

    Raises:
        ValueError: the scales are not those of the slice.
    """
    needed = (num_blocks(first_row + weight.shape[0]), num_blocks(first_col + weight.shape[1]))
    if tuple(scale.shape) != needed or not (0 <= first_row < BLOCK and 0 <= first_col < BLOCK):
        raise ValueError(
            f"dequantise_blocks: a slice of {tuple(weight.shape)} at ({first_row}, {first_col}) needs scales {needed}, found {tuple(scale.shape)}"
        )
    return dequantise_blocks_torch(weight, scale, dtype, first_row, first_col)


def quantise_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, cols] -> float8_e4m3fn of the same shape and float32 scales [ceil(rows / 128), ceil(cols / 128)]."""
    return quantise_blocks_torch(weight)
