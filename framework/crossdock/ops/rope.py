"""Rotary position embedding over interleaved pairs.

Every model runs in the interleaved form (pairs ``(2i, 2i + 1)``), because one complex multiplication rotates them: 4 to 10 times
cheaper on a CPU than two halves. A checkpoint that pairs ``(i, i + dim / 2)`` gets the rows of its query and key projections
reordered once at load; scores do not change when queries and keys are reordered alike.
"""

from __future__ import annotations

import torch

from crossdock.ops.rope_spec import RopeSpec
from crossdock.ops.rope_torch import inverse_frequencies, rotate_pairs_torch, rotation_table


class RopeTable:
    """Rotations of all positions up to a limit, grown on demand in whole chunks; float32 angles in any model dtype."""

    CHUNK = 4096
    """Positions added at a time: 1 MiB for a head dimension of 64."""

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self._factor = spec.table_factor
        self._frequencies = inverse_frequencies(spec).to(device)
        self._table = rotation_table(self._frequencies, self.CHUNK, self._factor)

    def rows(self, positions: torch.Tensor, max_position: int) -> torch.Tensor:
        """Rotations of one batch: [n] int64 -> [n, 1, dim / 2] complex64. ``max_position``: largest position in it, known to the host."""
        if max_position >= self._table.shape[0]:
            chunks = max_position // self.CHUNK + 1
            self._table = rotation_table(self._frequencies, chunks * self.CHUNK, self._factor)
        return self._table.index_select(0, positions).unsqueeze(1)


def rotate_pairs(rows: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotates pairs ``(2i, 2i + 1)`` of each head.

    Args:
        rows: [n, heads, dim] fp32 or bf16; the last dimension is contiguous.
        rotation: [n, 1, dim / 2] complex64 from ``RopeTable.rows``.

    Returns:
        [n, heads, dim], new, in the dtype of ``rows``; computed in float32.

    Raises:
        ValueError: the dimensions do not fit.
    """
    if rows.shape[-1] != 2 * rotation.shape[-1] or rows.shape[0] != rotation.shape[0]:
        raise ValueError(f"rotate_pairs: rows {tuple(rows.shape)} and rotation {tuple(rotation.shape)} do not fit")
    return rotate_pairs_torch(rows, rotation)


def halves_to_pairs(dim: int) -> list[int]:
    """Order in which the rows ``(i, i + dim / 2)`` of a head must be taken to become pairs ``(2i, 2i + 1)``."""
    half = dim // 2
    return [row for i in range(half) for row in (i, i + half)]
