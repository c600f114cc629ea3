"""The split that weighs loads against ways: against costs added up one by one, and the kernels against torch."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from crossdock.types.placement import Placement, Topology
from crossdock_eplb_algos._shared.copy_table import CopyTable, copy_table, loads_without_choice, tokens_of_rows
from crossdock_eplb_algos._shared.kernels.even_shares import even_shares
from crossdock_eplb_algos.expert_location.locality.kernels.least_cost import least_cost, least_cost_compiled
from crossdock_eplb_algos.expert_location.locality.kernels.least_cost_torch import (
    MIXTURES,
    WayPrices,
    nearest_tokens,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDING = 1e-5
"""Of the whole cost: sums of a few thousand float32 numbers in another order."""
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `interpreter`)"
)
SHAPES = [(4, 2, 5, 12), (4, 1, 8, 8), (6, 3, 10, 12), (8, 8, 12, 16), (12, 1, 20, 36), (32, 4, 56, 64)]
"""ranks, nodes, experts, slots."""


def problem(ranks: int, nodes: int, experts: int, slots: int, most: int) -> tuple[CopyTable, torch.Tensor]:
    """A random placement, and up to ``most`` tokens of each rank and expert."""
    rng = np.random.default_rng(ranks + slots + most)
    held = rng.permutation([*range(experts), *rng.integers(0, experts, slots - experts).tolist()])
    topology = Topology(num_gpus=ranks, num_nodes=nodes, num_physical_experts=slots)
    table = copy_table(Placement.from_physical(held[None], experts).logical_to_physical[0], topology)
    return table, torch.from_numpy(rng.integers(0, most + 1, (ranks, experts)))


def cost(shares: torch.Tensor, table: CopyTable, counts: torch.Tensor, prices: WayPrices) -> float:
    """Largest load plus mean price of the way, added up rank by rank and node by node."""
    fullest = float((loads_without_choice(table, counts.sum(0)) + shares.sum(0)).max())
    ranks, per_node = counts.shape[0], counts.shape[0] // prices.num_nodes
    price = 0.0
    for row, held in zip(shares.tolist(), tokens_of_rows(table, counts).t().tolist(), strict=True):
        on_rank = sum(min(share, have) for share, have in zip(row, held, strict=True))
        nodes = [slice(begin, begin + per_node) for begin in range(0, ranks, per_node)]
        on_node = sum(min(sum(row[node]), sum(held[node])) for node in nodes)
        price += prices.link_cost * (on_node - on_rank) + prices.node_cost * (sum(held) - on_node)
    return fullest + price / ranks


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("link_cost", "node_cost"), [(0.0, 0.0), (0.05, 0.5), (3.0, 9.0)])
@pytest.mark.parametrize("most", [0, 1, 50])
def test_no_mixture_costs_less(shape: tuple[int, int, int, int], link_cost: float, node_cost: float, most: int) -> None:
    table, counts = problem(*shape, most)
    prices = WayPrices(link_cost=link_cost, node_cost=node_cost, num_nodes=shape[1])
    even = even_shares(counts.sum(0), table)
    found = least_cost(even, counts, counts.sum(0), table, prices)
    near = nearest_tokens(tokens_of_rows(table, counts).t().to(torch.float32), table.slots >= 0, shape[1])
    mixed = [near + part / (MIXTURES - 1) * (even - near) for part in range(MIXTURES)]
    least = min(cost(each, table, counts, prices) for each in mixed)
    assert cost(found, table, counts, prices) == pytest.approx(least, rel=ROUNDING)
    assert torch.allclose(found.sum(1), even.sum(1), rtol=ROUNDING)
    assert not bool(found[table.slots < 0].any()), "tokens for a rank without a copy"


@needs_triton
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("link_cost", "node_cost"), [(0.0, 0.0), (0.05, 0.5), (3.0, 9.0)])
@pytest.mark.parametrize("most", [0, 1, 50])
def test_the_kernels_find_a_split_that_costs_as_little_as_that_of_torch(
    shape: tuple[int, int, int, int], link_cost: float, node_cost: float, most: int
) -> None:
    table, counts = problem(*shape, most)
    prices = WayPrices(link_cost=link_cost, node_cost=node_cost, num_nodes=shape[1])
    tokens = counts.sum(0)
    even = even_shares(tokens, table)
    expected = least_cost(even, counts, tokens, table, prices)
    found = least_cost_compiled(even.to(DEVICE), counts.to(DEVICE), tokens.to(DEVICE), table.to(DEVICE), prices).cpu()
    assert cost(found, table, counts, prices) == pytest.approx(cost(expected, table, counts, prices), rel=ROUNDING)
    assert torch.allclose(found.sum(1), even.sum(1), rtol=ROUNDING)
    assert not bool(found[table.slots < 0].any()), "tokens for a rank without a copy"
