"""Readable truth of ``store_rows``."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def store_rows_torch(slots: torch.Tensor, rows: Sequence[torch.Tensor], pools: Sequence[torch.Tensor]) -> None:
    """See ``crossdock_attention.attention.triton.kernels.store_rows.store_rows``."""
    for values, pool in zip(rows, pools, strict=True):
        pool.flatten(0, 1)[slots] = values.reshape(len(slots), *pool.shape[2:])
