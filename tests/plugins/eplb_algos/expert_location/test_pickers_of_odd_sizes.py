"""Every picker on sizes nobody serves: one expert, one rank, a GPU with copies only, all tokens on one expert, padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from crossdock.groups import resolve_sizes
from crossdock.location import make_expert_location, overwrite_layer, placement_maps
from crossdock.testing.world import OneProcessWorld, RankContext
from crossdock.types.location import PickerSpec
from crossdock.types.parallel import ParallelSizes
from crossdock.types.placement import Placement, Topology

PICKERS = ("static", "dynamic", "lp", "locality")
SIZES = ((1, 1, 1), (1, 1, 5), (1, 5, 9), (2, 1, 2), (3, 7, 9), (4, 5, 20))
"""Ranks, experts, slots."""


def random_slots(num_experts: int, num_slots: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    slots = np.concatenate([np.arange(num_experts), generator.integers(0, num_experts, num_slots - num_experts)])
    return generator.permutation(slots)[None]


def batch(rank: int, num_experts: int) -> torch.Tensor:
    """Nothing on the last of several ranks; all rows alike on the first one; rows without a token at the end."""
    chosen = min(2, num_experts)
    if rank == 0:
        rows = np.tile(np.arange(chosen), (40, 1))
    else:
        generator = np.random.default_rng(rank)
        rows = np.stack([generator.permutation(num_experts)[:chosen] for _ in range(7 * rank)])
    return torch.from_numpy(np.concatenate([rows, np.full((3, chosen), -1)]))


def picks(
    context: RankContext, name: str, sizes: ParallelSizes, num_experts: int, num_slots: int, is_replicated: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Picks before and after the map was overwritten, and the experts of the picked slots."""
    ranks = sizes.moe_ep_size
    spec = PickerSpec(
        maps=placement_maps(
            Placement.from_physical(random_slots(num_experts, num_slots, 1), num_experts), torch.device("cpu")
        ),
        topology=Topology(num_gpus=ranks, num_nodes=1, num_physical_experts=num_slots),
        sizes=sizes,
        place=context.place(sizes),
        comms=context.comms_of(sizes),
        replicated_rows=is_replicated,
    )
    picker = make_expert_location(name, {}, spec)
    ids = batch(1 if is_replicated else context.rank, num_experts)
    if ranks > 1 and context.rank == ranks - 1 and not is_replicated:
        ids = ids[:0]
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for seed in (1, 2):
        if seed == 2:
            new = Placement.from_physical(random_slots(num_experts, num_slots, seed), num_experts)
            overwrite_layer(spec.maps, 0, new, row=0)
            picker.placement_changed(0)
        slots = picker.pick(0, ids, ids.shape[0])
        assert slots.shape == ids.shape
        live = ids >= 0
        experts = spec.maps.physical_to_logical[0][slots[live]]
        assert torch.equal(experts, ids[live]), "a slot of another expert was picked"
        found.append((slots[live], experts))
    return found


@pytest.mark.parametrize(("ranks", "num_experts", "num_slots"), SIZES)
@pytest.mark.parametrize("name", PICKERS)
def test_a_picked_slot_holds_the_expert_whatever_the_sizes(
    name: str, ranks: int, num_experts: int, num_slots: int
) -> None:
    sizes = resolve_sizes(ranks=ranks, attn_dp_size=ranks)
    OneProcessWorld(sizes).run(picks, name, sizes, num_experts, num_slots, False)


@pytest.mark.parametrize(("ranks", "num_experts", "num_slots"), SIZES)
@pytest.mark.parametrize("name", ["dynamic", "lp", "locality"])
def test_ranks_with_the_same_rows_pick_alike_whatever_the_sizes(
    name: str, ranks: int, num_experts: int, num_slots: int
) -> None:
    sizes = resolve_sizes(ranks=ranks, attn_dp_size=ranks)
    results = OneProcessWorld(sizes).run(picks, name, sizes, num_experts, num_slots, True)
    for found in results:
        assert all(torch.equal(own[0], first[0]) for own, first in zip(found, results[0], strict=True))
