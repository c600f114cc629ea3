"""What both forms of prefill ask of queries, keys and values."""

from __future__ import annotations

import torch


def key_parts(k: torch.Tensor, k_rest: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys in two parts, of which the second may be empty. A head size between powers of two is cut rather than padded: 192 is 128 + 64."""
    if k_rest is not None:
        return k, k_rest
    key_dim = 1 << (k.shape[2].bit_length() - 1)
    return k[..., :key_dim], k[..., key_dim:]


def can_describe(heads: torch.Tensor) -> bool:
    """Whether tiles of [tokens, dim] of [rows, heads, dim] can come through a descriptor: aligned rows, and a width that needs no padding."""
    width = heads.shape[2]
    aligned = heads.data_ptr() % 16 == 0 and heads.stride(0) * heads.element_size() % 16 == 0
    return width == 0 or (aligned and heads.stride(2) == 1 and width >= 16 and width & (width - 1) == 0)


def heads_width(heads: torch.Tensor) -> int:
    """Elements from a row's first to its last, for [rows, heads, dim] of any strides."""
    return (heads.shape[1] - 1) * heads.stride(1) + heads.shape[2]
