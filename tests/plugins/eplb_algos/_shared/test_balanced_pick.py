"""Picks that balance a batch, in a CUDA graph: the placement changes under it and the next replay follows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from crossdock.comm import local_comms
from crossdock.groups import rank_place, resolve_sizes
from crossdock.location import make_expert_location, overwrite_layer, placement_maps
from crossdock.testing.world import OneProcessWorld, RankContext
from crossdock.types.comm import Comms
from crossdock.types.location import PickerSpec
from crossdock.types.parallel import RankPlace
from crossdock.types.placement import Placement, Topology

NUM_EXPERTS, NUM_SLOTS, NUM_RANKS = 8, 12, 4
TOPOLOGY = Topology(num_gpus=NUM_RANKS, num_nodes=2, num_physical_experts=NUM_SLOTS)
SIZES = resolve_sizes(ranks=NUM_RANKS, attn_dp_size=NUM_RANKS)
PLACEMENTS = [
    Placement.from_physical(np.array([[*range(8), 0, 1, 2, 3]]), NUM_EXPERTS),
    Placement.from_physical(np.array([[5, 5, 5, 4, 3, 2, 1, 0, 6, 7, 5, 0]]), NUM_EXPERTS),
    Placement.from_physical(np.array([[*range(8), 7, 6, 5, 4]]), NUM_EXPERTS),
]


def ids(device: torch.device) -> torch.Tensor:
    drawn = torch.randint(0, NUM_EXPERTS, (40, 2), generator=torch.Generator().manual_seed(0))
    drawn[3] = -1
    return drawn.to(device)


def spec_of(place: RankPlace, comms: Comms, device: torch.device, *, replicated_rows: bool) -> PickerSpec:
    return PickerSpec(
        maps=placement_maps(PLACEMENTS[0], device),
        topology=TOPOLOGY,
        sizes=SIZES,
        place=place,
        comms=comms,
        replicated_rows=replicated_rows,
    )


def assert_right(spec: PickerSpec, picks: torch.Tensor, asked: torch.Tensor) -> None:
    held = spec.maps.physical_to_logical[0][picks.clamp(min=0)]
    assert torch.equal(torch.where(picks >= 0, held, -1), asked)


def follow_switches(context: RankContext, name: str) -> None:
    spec = spec_of(context.place(SIZES), context.comms_of(SIZES), torch.device("cpu"), replicated_rows=False)
    picker = make_expert_location(name, {}, spec)
    for placement in PLACEMENTS:
        overwrite_layer(spec.maps, 0, placement)
        picker.placement_changed(0)
        asked = ids(torch.device("cpu"))
        assert_right(spec, picker.pick(0, asked, 40), asked)


@pytest.mark.parametrize("name", ["lp", "locality"])
def test_picks_follow_the_placement(name: str) -> None:
    OneProcessWorld(SIZES).run(follow_switches, name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["lp", "locality", "dynamic"])
def test_a_captured_pick_follows_the_placement(name: str) -> None:
    device = torch.device("cuda")
    # Ranks that hold the same rows send nothing, so one of four is enough.
    spec = spec_of(rank_place(SIZES, 0), local_comms(), device, replicated_rows=True)
    picker = make_expert_location(name, {}, spec)
    asked = ids(device).clamp(min=0)
    picker.pick(0, asked, 40)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        picks = picker.pick(0, asked, 40)
    for placement in PLACEMENTS:
        overwrite_layer(spec.maps, 0, placement)
        picker.placement_changed(0)
        graph.replay()
        assert_right(spec, picks, asked)
