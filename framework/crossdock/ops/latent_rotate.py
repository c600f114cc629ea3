# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""What a latent-attention layer does between its projections and attention: rotation of query parts and key, norm of the latent."""

from __future__ import annotations

import torch

from crossdock.ops.early_launch import early_launch
from crossdock.ops.norm_rotate import norm_rotate
from crossdock.ops.rms_norm import rms_norm
from crossdock.ops.tile_size import block_of

HEADS_BLOCK = 16
"""Query heads a program takes."""


def latent_rotate(
    queries: torch.Tensor, latent: torch.Tensor, weight: torch.Tensor, eps: float, rotation: torch.Tensor
) -> None:
    """In place: the last part of each query head and of the latent row rotated, the front of the latent row normed.

    Args:
        queries: [n, heads, nope + rope] fp32 or bf16, heads side by side, any stride between rows.
        latent: [n, rank + rope], the same dtype, any stride between rows.
        weight: [rank] gain of the norm.
        eps: added to the mean of squares.
        rotation: [n, 1, rope / 2] complex64 from ``RopeTable.rows``.

    Raises:
        ValueError: the dimensions do not fit.
    """
    rank, rope = weight.shape[0], 2 * rotation.shape[-1]
    if latent.shape[1] != rank + rope or queries.shape[0] != rotation.shape[0] or queries.shape[2] < rope:
        raise ValueError(
            f"latent_rotate: queries {tuple(queries.shape)}, latent {tuple(latent.shape)}, weight {tuple(weight.shape)} and "
            f"rotation {tuple(rotation.shape)} do not fit"
        )
    if queries.is_cuda:
        latent_rotate_fused(queries, latent, weight, eps, rotation)
        return
    turned, key = queries[..., -rope:], latent[:, None, rank:]
    turned.copy_(norm_rotate(turned, None, eps, rotation))
    key.copy_(norm_rotate(key, None, eps, rotation))
    front = latent[:, :rank]
    front.copy_(rms_norm(front, weight, eps))


def latent_rotate_fused(
    queries: torch.Tensor, latent: torch.Tensor, weight: torch.Tensor, eps: float, rotation: torch.Tensor
) -> None:
    """The kernel's form of ``latent_rotate``; checked by the caller."""
    num_rows, heads, query_dim = queries.shape
    if num_rows == 0:
        return
    # Imported at the first call: CPU installations have no triton.
    from crossdock.ops.latent_rotate_triton import latent_rotate_kernel

    half, heads_block = rotation.shape[-1], min(HEADS_BLOCK, block_of(heads))
    latent_rotate_kernel[(num_rows, 1 + -(-heads // heads_block))](
        queries,
        latent,
        weight,
        torch.view_as_real(rotation),
        eps,
        queries.stride(0),
        latent.stride(0),
        heads=heads,
        heads_block=heads_block,
        query_dim=query_dim,
        rank=weight.shape[0],
        rank_block=block_of(weight.shape[0]),
        half=half,
        half_block=block_of(half),
        num_warps=4,
        **early_launch(queries),
    )
