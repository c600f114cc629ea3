"""Residual addition and the norm behind it: what stands between every two blocks of a decoder."""

from __future__ import annotations

from typing import Any

import torch

from crossdock.ops.early_launch import early_launch
from crossdock.ops.norms_cpu import add_rms_norm_cpu, takes
from crossdock.ops.rms_norm import rms_norm
from crossdock.ops.tile_size import block_of


def add_rms_norm(
    residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``total = residual + update`` and ``rms_norm(total)``, both [n, H] in the dtype of ``residual``; zero rows are fine.

    Args:
        residual: [n, H] fp32 or bf16, contiguous on a GPU.
        update: [n, H], the same dtype.
        weight: [H].
        eps: added to the mean of squares.

    Raises:
        ValueError: the shapes differ.
    """
    if residual.shape != update.shape or weight.shape != residual.shape[-1:]:
        raise ValueError(
            f"add_rms_norm: residual {tuple(residual.shape)}, update {tuple(update.shape)} and weight {tuple(weight.shape)} do not fit"
        )
    if residual.dim() == 2 and takes(residual, update, weight):
        return add_rms_norm_cpu(residual, update, weight, eps)
    if not residual.is_cuda:
        total = residual + update
        return total, rms_norm(total, weight, eps)
    return add_rms_norm_fused(residual, update, weight, eps)


def add_rms_norm_fused(
    residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's form of ``add_rms_norm``; checked by the caller."""
    residual, update = residual.contiguous(), update.contiguous()
    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    if residual.shape[0] == 0:
        return total, normed
    # Imported at the first call: CPU installations have no triton.
    from crossdock.ops.add_rms_norm_triton import add_rms_norm_kernel

    num_rows, hidden_size = residual.shape
    block = block_of(hidden_size)
    launch: Any = add_rms_norm_kernel
    launch[(num_rows,)](
        residual,
        update,
        weight,
        total,
        normed,
        hidden_size,
        eps,
        block=block,
        num_warps=8 if block >= 2048 else 4,
        **early_launch(residual),
    )
    return total, normed
