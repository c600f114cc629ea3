"""Where tokens go when only the way counts."""

from __future__ import annotations

import torch


def nearest_tokens(held: torch.Tensor, holds: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """[M, R] float tokens of each rank, and which ranks hold a copy -> [M, R] tokens that each copy gets. Sums of rows stay.

    All to the rank's own copy where it has one; else evenly over the copies on its machine; else evenly over all.
    """
    rows, num_ranks = held.shape
    stays = torch.where(holds, held, 0.0)
    rest = (held - stays).view(rows, num_nodes, -1)
    copies = holds.view(rows, num_nodes, -1)
    on_node = copies.sum(2, keepdim=True)
    near = torch.where(on_node > 0, rest.sum(2, keepdim=True) / on_node.clamp(min=1), 0.0) * copies
    away = torch.where(on_node > 0, 0.0, rest.sum(2, keepdim=True)).sum(1)
    far = away / holds.sum(1, keepdim=True).clamp(min=1) * holds
    return stays + near.view(rows, num_ranks) + far
