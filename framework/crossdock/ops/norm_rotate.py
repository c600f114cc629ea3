"""Norm of queries and keys and their rotation: what a GQA layer does between its projection and attention."""

from __future__ import annotations

import sys
from typing import Any

import torch

from crossdock.ops.early_launch import early_launch
from crossdock.ops.norms_cpu import MOST_THREADS, norm_rotate_cpu, takes
from crossdock.ops.rms_norm import rms_norm
from crossdock.ops.rope import rotate_pairs
from crossdock.ops.tile_size import block_of

HEADS_BLOCK = 8
"""Heads a program takes."""


def norm_rotate(rows: torch.Tensor, weight: torch.Tensor | None, eps: float, rotation: torch.Tensor) -> torch.Tensor:
    """Each head normed over its own elements (when ``weight`` is given), then its pairs rotated.

    Args:
        rows: [n, heads, dim] fp32 or bf16, any strides but a contiguous last dimension.
        weight: [heads, dim] gain of every head, or None for no norm.
        eps: added to the mean of squares.
        rotation: [n, 1, dim / 2] complex64 from ``RopeTable.rows``.

    Returns:
        [n, heads, dim] new, in the dtype of ``rows``.

    Raises:
        ValueError: the dimensions do not fit.
    """
    fits = rows.shape[-1] == 2 * rotation.shape[-1] and rows.shape[0] == rotation.shape[0]
    whole = rotation.is_contiguous() and (weight is None or weight.is_contiguous())
    # torch turns pairs at the ends of its vectors with other roundings, so in float32 a row's bits would depend on where it lies.
    most_threads = sys.maxsize if rows.dtype is torch.float32 else MOST_THREADS
    if fits and whole and takes(rows, weight, most_threads=most_threads):
        return norm_rotate_cpu(rows, weight, eps, rotation)
    if not rows.is_cuda:
        if weight is not None:
            rows = rms_norm(rows, None, eps).mul_(weight)
        return rotate_pairs(rows, rotation)
    if not fits:
        raise ValueError(f"norm_rotate: rows {tuple(rows.shape)} and rotation {tuple(rotation.shape)} do not fit")
    return norm_rotate_fused(rows, weight, eps, rotation)


def norm_rotate_fused(
    rows: torch.Tensor, weight: torch.Tensor | None, eps: float, rotation: torch.Tensor
) -> torch.Tensor:
    """The kernel's form of ``norm_rotate``; checked by the caller."""
    num_rows, heads, dim = rows.shape
    out = torch.empty(num_rows, heads, dim, dtype=rows.dtype, device=rows.device)
    if num_rows == 0:
        return out
    # Imported at the first call: CPU installations have no triton.
    from crossdock.ops.norm_rotate_triton import norm_rotate_kernel

    half = dim // 2
    launch: Any = norm_rotate_kernel
    heads_block = min(HEADS_BLOCK, block_of(heads))
    launch[(num_rows, -(-heads // heads_block))](
        rows,
        rows if weight is None else weight,
        torch.view_as_real(rotation),
        out,
        eps,
        rows.stride(0),
        rows.stride(1),
        heads=heads,
        heads_block=heads_block,
        half=half,
        half_block=block_of(half),
        has_norm=weight is not None,
        num_warps=4,
        **early_launch(rows),
    )
    return out
