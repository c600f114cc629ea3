"""Placements as device tensors of fixed width, overwritten in place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from crossdock.errors import InvalidPlacement, UnknownPlugin
from crossdock.location import make_expert_location, overwrite_layer, placement_maps, replica_width
from crossdock.placement import trivial_placement
from crossdock.types.location import PickerSpec
from crossdock.types.placement import Placement

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("physical", "logical", "limit", "width"), [(8, 8, 0, 1), (8, 6, 0, 3), (8, 6, 2, 2), (8, 6, 9, 3)]
)
def test_the_width_holds_every_possible_placement_or_the_limit(
    physical: int, logical: int, limit: int, width: int
) -> None:
    assert replica_width(physical, logical, limit) == width


def test_the_trivial_placement_puts_slot_i_on_expert_i_mod_e() -> None:
    maps = placement_maps(trivial_placement(2, 3, 5), CPU)
    assert maps.physical_to_logical.tolist() == [[0, 1, 2, 0, 1]] * 2
    assert maps.logical_to_physical.tolist() == [[[0, 3, -1], [1, 4, -1], [2, -1, -1]]] * 2
    assert maps.replica_counts.tolist() == [[2, 2, 1]] * 2


def test_a_switch_overwrites_one_layer_at_the_same_addresses() -> None:
    maps = placement_maps(trivial_placement(2, 3, 5), CPU)
    addresses = [each.data_ptr() for each in (maps.physical_to_logical, maps.logical_to_physical, maps.replica_counts)]
    overwrite_layer(maps, 1, Placement.from_physical(np.array([[0, 1, 2, 2, 2], [2, 2, 2, 1, 0]]), 3))
    assert maps.physical_to_logical.tolist() == [[0, 1, 2, 0, 1], [2, 2, 2, 1, 0]]
    assert maps.logical_to_physical[1].tolist() == [[4, -1, -1], [3, -1, -1], [0, 1, 2]]
    assert maps.replica_counts[1].tolist() == [1, 1, 3]
    assert addresses == [
        each.data_ptr() for each in (maps.physical_to_logical, maps.logical_to_physical, maps.replica_counts)
    ]


def test_a_placement_with_more_replicas_than_the_maps_hold_is_refused_by_number() -> None:
    maps = placement_maps(trivial_placement(1, 3, 5), CPU, max_replicas=2)
    with pytest.raises(InvalidPlacement, match="an expert has 3 replicas and the maps hold 2"):
        overwrite_layer(maps, 0, Placement.from_physical(np.array([[2, 2, 2, 1, 0]]), 3))


def test_another_number_of_slots_is_refused() -> None:
    maps = placement_maps(trivial_placement(1, 3, 5), CPU)
    with pytest.raises(InvalidPlacement, match="has 6 slots and 3 experts, the maps were made for 5 and 3"):
        overwrite_layer(maps, 0, trivial_placement(1, 3, 6))


def test_an_unknown_picker_is_named() -> None:
    spec: PickerSpec = object()  # type: ignore[assignment]
    with pytest.raises(UnknownPlugin, match="statik"):
        make_expert_location("statik", {}, spec)


def test_a_narrower_placement_leaves_no_old_replicas_behind() -> None:
    maps = placement_maps(Placement.from_physical(np.array([[2, 2, 2, 1, 0]]), 3), CPU)
    overwrite_layer(maps, 0, Placement.from_physical(np.array([[0, 1, 2, 0, 1]]), 3, max_replicas=2))
    assert maps.logical_to_physical.tolist() == [[[0, 3, -1], [1, 4, -1], [2, -1, -1]]]
