"""The split of a batch between the nearest copies and the evenest split that costs least."""

from __future__ import annotations

import attrs
import torch

MIXTURES = 9
"""Parts of the even split that are tried, from 0 to 1 in equal steps."""


@attrs.frozen(kw_only=True)
class WayPrices:
    """What the way costs, in units of one token computed by one expert."""

    link_cost: float
    """Of a token that goes to another rank of the same machine."""
    node_cost: float
    """Of a token that goes to another machine."""
    num_nodes: int
    """Machines; ranks of a machine have neighbouring numbers."""


def least_cost_torch(
    even: torch.Tensor, held: torch.Tensor, holds: torch.Tensor, base: torch.Tensor, prices: WayPrices
) -> torch.Tensor:
    """Largest load of a rank plus the mean price of what a rank sends, at its least.

    Between the nearest copies and the evenest split both are convex in the part of the latter, so a coarse search finds the best.

    Args:
        even: [M, R] float32 tokens of each copy in the evenest split.
        held: [M, R] float32 tokens that each rank has for each row.
        holds: [M, R] bool, which ranks have a copy.
        base: [R] float32 tokens that ranks get whatever is picked.

    Returns:
        [M, R] float32 tokens of each copy; sums of rows are those of ``even``.
    """
    near = nearest_tokens(held, holds, prices.num_nodes)
    part = torch.linspace(0.0, 1.0, MIXTURES, device=even.device)[:, None, None]
    mixtures = near + part * (even - near)
    loads = base + mixtures.sum(1)
    best = (loads.amax(1) + _way_cost(held, mixtures, prices)).argmin(0, keepdim=True)
    return mixtures.index_select(0, best)[0]


def nearest_tokens(held: torch.Tensor, holds: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """[M, R] float tokens of each rank, and which ranks hold a copy -> [M, R] tokens that each copy gets. Sums of rows stay.

    All to the rank's own copy where it has one; else evenly over the copies on its machine; else evenly over all.
    """
    rows, num_ranks = held.shape
    stays = torch.where(holds, held, 0.0)
    by_node = (rows, num_nodes, num_ranks // num_nodes)
    rest, copies = (held - stays).view(by_node), holds.view(by_node)
    on_node = copies.sum(2, keepdim=True)
    near = torch.where(on_node > 0, rest.sum(2, keepdim=True) / on_node.clamp(min=1), 0.0) * copies
    away = torch.where(on_node > 0, 0.0, rest.sum(2, keepdim=True)).sum(1)
    far = away / holds.sum(1, keepdim=True).clamp(min=1) * holds
    return stays + near.view(rows, num_ranks) + far


def _way_cost(held: torch.Tensor, mixtures: torch.Tensor, prices: WayPrices) -> torch.Tensor:
    """[mixtures] mean over ranks of the price of what leaves it, when as much as possible stays."""
    rows, num_ranks = held.shape
    stays_on_rank = torch.minimum(mixtures, held).sum((1, 2))
    by_node = (len(mixtures), rows, prices.num_nodes, num_ranks // prices.num_nodes)
    stays_on_node = torch.minimum(mixtures.view(by_node).sum(3), held.reshape(by_node[1:]).sum(2)).sum((1, 2))
    leaves_rank, leaves_node = stays_on_node - stays_on_rank, held.sum() - stays_on_node
    return (prices.link_cost * leaves_rank + prices.node_cost * leaves_node) / num_ranks
