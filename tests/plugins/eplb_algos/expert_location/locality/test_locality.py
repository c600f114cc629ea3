"""The ``locality`` picker: free links give the even split, dear ones keep tokens at home."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from crossdock.groups import resolve_sizes
from crossdock.location import make_expert_location, placement_maps
from crossdock.testing.world import OneProcessWorld, RankContext, RankFailure
from crossdock.types.location import PickerSpec
from crossdock.types.placement import Placement, Topology

NUM_RANKS, NUM_EXPERTS = 4, 4
SIZES = resolve_sizes(ranks=NUM_RANKS, attn_dp_size=NUM_RANKS)
TOPOLOGY = Topology(num_gpus=NUM_RANKS, num_nodes=2, num_physical_experts=8)
SLOTS = np.array([[0, 1, 0, 2, 1, 3, 2, 3]])
"""Experts 0 and 3 have both copies on one machine, 1 and 2 one on each."""


def pick(context: RankContext, rows: tuple[int, ...], options: dict[str, object], replicated: bool) -> torch.Tensor:
    spec = PickerSpec(
        maps=placement_maps(Placement.from_physical(SLOTS, NUM_EXPERTS), torch.device("cpu")),
        topology=TOPOLOGY,
        sizes=SIZES,
        place=context.place(SIZES),
        comms=context.comms_of(SIZES),
        replicated_rows=replicated,
    )
    picker = make_expert_location("locality", options, spec)
    ids = torch.tensor([[0, 1], [1, 2], [1, 3], [1, 0]]).repeat(rows[context.rank], 1)
    return picker.pick(0, ids, ids.shape[0])


def picks_with(**costs: object) -> list[torch.Tensor]:
    return OneProcessWorld(SIZES).run(pick, (30, 10, 10, 10), dict(costs), False)


def largest_load(picks: list[torch.Tensor]) -> int:
    slots = torch.cat([each.flatten() for each in picks]).numpy()
    return int(np.bincount(slots // TOPOLOGY.slots_per_gpu, minlength=NUM_RANKS).max())


def tokens_that_leave(picks: list[torch.Tensor], ranks_together: int) -> int:
    return sum(
        int((each // TOPOLOGY.slots_per_gpu // ranks_together != rank // ranks_together).sum())
        for rank, each in enumerate(picks)
    )


def test_free_links_give_the_least_largest_load() -> None:
    free, dear = picks_with(link_cost=0.0, node_cost=0.0), picks_with(link_cost=100.0, node_cost=100.0)
    assert largest_load(free) < largest_load(dear)


def test_dear_links_keep_tokens_on_ranks_and_machines() -> None:
    free, dear = picks_with(link_cost=0.0, node_cost=0.0), picks_with(link_cost=100.0, node_cost=100.0)
    assert tokens_that_leave(dear, 1) < tokens_that_leave(free, 1)
    assert tokens_that_leave(dear, 2) <= tokens_that_leave(free, 2)


def test_the_price_decides_between_the_two() -> None:
    by_price = [largest_load(picks_with(link_cost=cost, node_cost=cost)) for cost in (0.0, 0.5, 2.0, 100.0)]
    assert by_price == sorted(by_price)


def test_where_ranks_hold_the_same_rows_it_picks_as_lp_and_everywhere_the_same() -> None:
    picks = OneProcessWorld(SIZES).run(pick, (20, 20, 20, 20), {"link_cost": 9.0}, True)
    assert all(torch.equal(each, picks[0]) for each in picks)


def test_a_negative_price_is_refused() -> None:
    with pytest.raises(RankFailure, match="link_cost must not be negative"):
        OneProcessWorld(SIZES).run(pick, (1, 1, 1, 1), {"link_cost": -1.0}, False)
