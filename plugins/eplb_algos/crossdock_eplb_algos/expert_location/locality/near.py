"""Where the tokens of each rank go when only the way counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from crossdock_eplb_algos._shared.layer_copies import LayerCopies


def nearest_shares(copies: LayerCopies, num_nodes: int) -> torch.Tensor:
    """[R, M, K] float64: part of a rank's tokens of an expert that each copy gets. Rows add up to one.

    All to the rank's own copy where it has one; else evenly over the copies on its machine; else evenly over all.
    """
    size = copies.num_ranks // num_nodes
    ranks = torch.arange(copies.num_ranks, device=copies.ranks.device)[:, None, None]
    valid = (copies.ranks < copies.num_ranks).expand(copies.num_ranks, -1, -1)
    here = valid & (copies.ranks == ranks)
    on_node = valid & (copies.ranks // size == ranks // size)
    chosen = torch.where(here.any(2, keepdim=True), here, torch.where(on_node.any(2, keepdim=True), on_node, valid))
    return chosen.to(torch.float64) / chosen.sum(2, keepdim=True)
