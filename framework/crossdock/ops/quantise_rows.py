"""Rows in float8_e4m3fn with one float32 scale per 128 elements: the form of activations beside block-quantised weights."""

from __future__ import annotations

from typing import Any

import torch

from crossdock.ops.fp8_block_torch import BLOCK
from crossdock.ops.quantise_rows_torch import quantise_rows_torch

PROGRAM_BLOCKS = 8
"""Blocks of a row that a program quantises; a power of two."""
ROWS_MULTIPLE = 4
"""Scales by column start at multiples of 16 bytes, and torch's block-scaled product takes no other number of rows."""


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, H] fp32 or bf16 -> ([n, H] float8_e4m3fn, [n, H / 128] float32 contiguous).

    Raises:
        ValueError: H is no multiple of 128.
    """
    scales = torch.empty(rows.shape[0], _num_blocks(rows), dtype=torch.float32, device=rows.device)
    payload = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
    _quantise_into(rows, payload, scales)
    return payload, scales


def quantise_rows_by_column(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``quantise_rows``, for products that take rows by fours: [m, H] and [m, H / 128], m = n rounded up to a multiple of ``ROWS_MULTIPLE``.

    Columns of scales are contiguous and start at multiples of 16 bytes. Rows beyond n are unwritten.
    """
    num_rows, hidden_size = rows.shape
    padded = -(-num_rows // ROWS_MULTIPLE) * ROWS_MULTIPLE
    scales = torch.empty(_num_blocks(rows), padded, dtype=torch.float32, device=rows.device).t()
    payload = torch.empty(padded, hidden_size, dtype=torch.float8_e4m3fn, device=rows.device)
    _quantise_into(rows, payload[:num_rows], scales[:num_rows])
    return payload, scales


def _num_blocks(rows: torch.Tensor) -> int:
    if rows.dim() != 2 or rows.shape[1] % BLOCK:
        raise ValueError(f"quantise_rows: rows {tuple(rows.shape)} must be [n, H] with H a multiple of {BLOCK}")
    return rows.shape[1] // BLOCK


def _quantise_into(rows: torch.Tensor, payload: torch.Tensor, scales: torch.Tensor) -> None:
    if rows.is_cuda:
        quantise_rows_fused(rows, payload, scales)
        return
    found, found_scales = quantise_rows_torch(rows)
    payload.view(torch.uint8).copy_(found.view(torch.uint8))
    scales.copy_(found_scales)


def quantise_rows_fused(rows: torch.Tensor, payload: torch.Tensor, scales: torch.Tensor) -> None:
    """The kernel's form: fills ``payload`` [n, H] contiguous and ``scales`` [n, H / 128], whatever its strides; checked by the caller."""
    num_rows, num_blocks = scales.shape
    if num_rows == 0:
        return
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
