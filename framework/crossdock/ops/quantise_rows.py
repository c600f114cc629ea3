"""Rows in float8_e4m3fn with one float32 scale per 128 elements: the form of activations beside block-quantised weights."""

from __future__ import annotations

from typing import Any

import torch

from crossdock.ops.fp8_block_torch import BLOCK
from crossdock.ops.quantise_rows_torch import quantise_rows_torch

PROGRAM_BLOCKS = 8
"""Blocks of a row that a program quantises; a power of two."""
TMA_ROWS = 4
"""Scales by column start at multiples of 16 bytes."""


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, H] fp32 or bf16 -> ([n, H] float8_e4m3fn, [n, H / 128] float32 contiguous).

    Raises:
        ValueError: H is no multiple of 128.
    """
    scales = torch.empty(rows.shape[0], _num_blocks(rows), dtype=torch.float32, device=rows.device)
    return _quantise_into(rows, scales), scales


def quantise_rows_by_column(rows: torch.Tensor, align: int = TMA_ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``quantise_rows``, with scales [n, H / 128] whose columns are contiguous and start at multiples of ``align`` elements.

    By default these are 16 bytes, as copy engines want them.
    """
    num_rows = rows.shape[0]
    aligned = -(-num_rows // align) * align
    scales = torch.empty(_num_blocks(rows), aligned, dtype=torch.float32, device=rows.device).t()[:num_rows]
    return _quantise_into(rows, scales), scales


def _num_blocks(rows: torch.Tensor) -> int:
    if rows.dim() != 2 or rows.shape[1] % BLOCK:
        raise ValueError(f"quantise_rows: rows {tuple(rows.shape)} must be [n, H] with H a multiple of {BLOCK}")
    return rows.shape[1] // BLOCK


def _quantise_into(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    if rows.is_cuda:
        return quantise_rows_fused(rows, scales)
    payload, found = quantise_rows_torch(rows)
    scales.copy_(found)
    return payload


def quantise_rows_fused(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The kernel's form: returns the payload and fills ``scales`` [n, H / 128], whatever its strides; checked by the caller."""
    num_rows, num_blocks = scales.shape
    payload = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
    if num_rows == 0:
        return payload
    # Imported at the first call: CPU installations have no triton.
    from crossdock.ops.quantise_rows_triton import quantise_rows_kernel

    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    launch: Any = quantise_rows_kernel
    launch[(num_rows, -(-num_blocks // PROGRAM_BLOCKS))](
        rows,
        payload,
        scales,
        num_blocks,
        rows.stride(0),
        scales.stride(0),
        scales.stride(1),
        blocks=PROGRAM_BLOCKS,
        block=BLOCK,
        num_warps=4,
    )
    return payload
