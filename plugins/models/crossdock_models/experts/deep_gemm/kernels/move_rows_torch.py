"""Readable truth of ``move_rows``."""

from __future__ import annotations

import torch


def move_rows_torch(rows: torch.Tensor, positions: torch.Tensor, num_places: int, fill: float) -> torch.Tensor:
    """[P, H] in the dtype of ``rows`` with each row at its ``positions`` [R, K] (-1 = none) and ``fill`` elsewhere; scales move alike."""
    placed = torch.full((num_places, rows.shape[1]), fill, dtype=rows.dtype, device=rows.device)
    row, k = (positions >= 0).nonzero(as_tuple=True)
    placed[positions[row, k].long()] = rows[row]
    return placed
