"""The static pick: golden values (the facts, A2), nearness, and one stream that can be taken up at any layer."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from crossdock.comm import local_comms
from crossdock.errors import PluginDeclined
from crossdock.groups import rank_place, resolve_sizes
from crossdock.location import make_expert_location, overwrite_layer, placement_maps
from crossdock.types.location import Picker, PickerSpec, PlacementMaps
from crossdock.types.placement import Placement, Topology
from crossdock_eplb_algos.expert_location.static.nearest import Cluster, nearest_replica, picks_of_layer

LAYERS = ([0, 1, 2, 3, 4, 5, 0, 1], [0, 1, 2, 3, 0, 4, 5, 0])
ONE_NODE = (
    ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 5, 6]),
    ([6, 7, 2, 3, 4, 5], [7, 1, 2, 3, 5, 6]),
    ([0, 1, 2, 3, 4, 5], [4, 1, 2, 3, 5, 6]),
    ([6, 7, 2, 3, 4, 5], [7, 1, 2, 3, 5, 6]),
)
TWO_NODES = (
    ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 5, 6]),
    ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 5, 6]),
    ([6, 7, 2, 3, 4, 5], [4, 1, 2, 3, 5, 6]),
    ([6, 7, 2, 3, 4, 5], [7, 1, 2, 3, 5, 6]),
)
SIZES = resolve_sizes(ranks=4, attn_dp_size=4)


def picker(
    rank: int, num_nodes: int = 1, *, replicated: bool = False, slots: object = LAYERS
) -> tuple[Picker, PlacementMaps]:
    placement = Placement.from_physical(np.array(slots), 6)
    maps = placement_maps(placement, torch.device("cpu"))
    spec = PickerSpec(
        maps=maps,
        topology=Topology(num_gpus=4, num_nodes=num_nodes, num_physical_experts=placement.num_physical_experts),
        sizes=SIZES,
        place=rank_place(SIZES, rank),
        comms=local_comms(),
        replicated_rows=replicated,
    )
    return make_expert_location("static", {}, spec), maps


def table(found: Picker, layers: int = 2) -> tuple[list[int], ...]:
    every = torch.arange(6)[:, None]
    return tuple(found.pick(layer, every, 6).flatten().tolist() for layer in range(layers))


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(("num_nodes", "golden"), [(1, ONE_NODE), (2, TWO_NODES)])
def test_golden_picks(rank: int, num_nodes: int, golden: tuple[tuple[list[int], ...], ...]) -> None:
    assert table(picker(rank, num_nodes)[0]) == golden[rank]


@pytest.mark.parametrize("rank", range(4))
def test_switching_layers_in_order_gives_the_table_of_a_fresh_start(rank: int) -> None:
    changed, maps = picker(rank)
    target = Placement.from_physical(np.array([[5, 4, 3, 2, 1, 0, 5, 5], [1, 1, 0, 2, 3, 4, 5, 1]]), 6)
    for layer in range(2):
        overwrite_layer(maps, layer, target)
        changed.placement_changed(layer)
    assert table(changed) == table(picker(rank, slots=target.physical_to_logical)[0])


def test_a_switch_of_one_layer_leaves_the_others_alone() -> None:
    changed, maps = picker(2)
    before = table(changed)
    overwrite_layer(maps, 0, Placement.from_physical(np.array([[5, 4, 3, 2, 1, 0, 5, 5], LAYERS[1]]), 6))
    changed.placement_changed(0)
    after = table(changed)
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_the_nearest_replica_is_on_the_rank_then_on_the_node_unless_all_are_there() -> None:
    cluster = Cluster(num_ranks=4, num_nodes=2, num_slots=8)
    assert nearest_replica([5], 0, cluster) == 5
    assert nearest_replica([0, 6, 7], 3, cluster) == 6
    assert nearest_replica([2, 6], 0, cluster) == 2
    assert nearest_replica([0, 2], 0, cluster) == 0
    assert nearest_replica([4, 6], 0, cluster) is None
    assert nearest_replica([2, 3], 0, cluster) is None  # all on one node: none is nearer than the other


def test_ranks_without_a_near_replica_share_the_replicas_evenly() -> None:
    cluster = Cluster(num_ranks=8, num_nodes=1, num_slots=16)
    picks = picks_of_layer([[0, 2, 4]], cluster, random.Random(42))
    used = [picks[rank][0] for rank in range(3, 8)]
    assert sorted(used.count(slot) for slot in (0, 2, 4)) == [1, 2, 2]


def test_it_declines_where_ranks_hold_the_same_rows_and_could_pick_differently() -> None:
    with pytest.raises(PluginDeclined):
        picker(0, replicated=True)
    single = [[0, 1, 2, 3, 4, 5, 6, 7]]
    placement = Placement.from_physical(np.array(single), 8)
    spec = PickerSpec(
        maps=placement_maps(placement, torch.device("cpu")),
        topology=Topology(num_gpus=4, num_nodes=1, num_physical_experts=8),
        sizes=SIZES,
        place=rank_place(SIZES, 0),
        comms=local_comms(),
        replicated_rows=True,
    )
    assert make_expert_location("static", {}, spec).pick(0, torch.tensor([[7, 0]]), 1).tolist() == [[7, 0]]


def test_one_stream_is_walked_over_all_layers() -> None:
    generator = np.random.default_rng(1)
    slots = np.stack([generator.permutation(np.array([0, 1, 2, 3, 4, 5, 0, 0, 1, 1, 2, 2])) for _ in range(5)])
    placement = Placement.from_physical(slots, 6)
    cluster, draw = Cluster(num_ranks=4, num_nodes=1, num_slots=12), random.Random(42)
    wanted = [
        picks_of_layer([[int(slot) for slot in replicas if slot >= 0] for replicas in layer], cluster, draw)
        for layer in placement.logical_to_physical
    ]
    for rank in range(4):
        assert table(picker(rank, slots=slots)[0], layers=5) == tuple(layer[rank] for layer in wanted)
