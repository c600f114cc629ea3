"""Sizes of kernel tiles."""

from __future__ import annotations


def block_of(size: int) -> int:
    """The smallest power of two that holds ``size`` elements; kernels take blocks of powers of two only."""
    return 1 << max(0, size - 1).bit_length()
