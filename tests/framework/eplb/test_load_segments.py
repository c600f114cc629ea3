"""Counts since the last decision: by segment, by rank, and through a change of the map."""

from __future__ import annotations

import torch
from crossdock.comm import local_comms
from crossdock.eplb.load_segments import NUM_SEGMENTS, LoadSegments
from crossdock.location import overwrite_layer, placement_maps
from crossdock.placement import trivial_placement
from crossdock.types.placement import Placement

WORLD = local_comms().world


def segments(interval: int = 8) -> tuple[LoadSegments, object]:
    maps = placement_maps(trivial_placement(2, 3, 4), torch.device("cpu"))
    return LoadSegments(maps, 2, interval), maps


def counts(*values: int) -> torch.Tensor:
    return torch.tensor([values, values], dtype=torch.int32)


def test_passes_fall_into_segments_in_order_and_what_comes_late_into_the_last() -> None:
    load, _ = segments(interval=8)
    for number in range(10):
        load.push(counts(number, 0, 0, 0))
    found = load.totals(WORLD)
    assert found.counts[:, 0, 0].tolist() == [0 + 1, 2 + 3, 4 + 5, 6 + 7 + 8 + 9]
    assert found.by_rank.tolist() == [[45, 0]] * 2


def test_segments_without_a_pass_are_left_out() -> None:
    load, _ = segments(interval=8)
    assert load.totals(WORLD).counts.shape == (1, 2, 3)
    for _ in range(3):
        load.push(counts(1, 1, 1, 1))
    assert load.totals(WORLD).counts.shape == (2, 2, 3)
    assert NUM_SEGMENTS >= 2


def test_copies_of_an_expert_are_added_up() -> None:
    load, _ = segments()
    load.push(counts(5, 1, 2, 7))  # slots hold experts 0, 1, 2, 0
    assert load.totals(WORLD).counts.sum(0).tolist() == [[12, 1, 2]] * 2


def test_counts_keep_the_map_of_their_time() -> None:
    load, maps = segments()
    load.push(counts(5, 1, 2, 7))
    load.flush_layer(0)
    overwrite_layer(maps, 0, Placement.from_physical([[2, 2, 1, 0]] * 2, 3))  # type: ignore[arg-type]
    load.push(counts(1, 1, 1, 1))
    found = load.totals(WORLD)
    assert found.counts.sum(0).tolist() == [[12 + 1, 1 + 1, 2 + 2], [12 + 2, 1 + 1, 2 + 1]]
    assert found.by_rank.tolist() == [[6 + 2, 9 + 2]] * 2


def test_clear_forgets_everything() -> None:
    load, _ = segments()
    load.push(counts(5, 1, 2, 7))
    load.flush_layer(1)
    load.clear()
    found = load.totals(WORLD)
    assert not bool(found.counts.any())
    assert not bool(found.by_rank.any())
    assert load.num_passes == 0
