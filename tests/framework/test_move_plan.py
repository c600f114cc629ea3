"""Where each slot gets its expert from."""

from __future__ import annotations

import numpy as np
import pytest
from crossdock.errors import InvalidPlacement
from crossdock.move_plan import layer_moves, move_plan
from crossdock.types.placement import Placement, Topology

FOUR_GPUS = Topology(num_gpus=4, num_nodes=2, num_physical_experts=8)


def _found(old: list[int], new: list[int], topology: Topology) -> list[tuple[int, int, str, int, int]]:
    moves = layer_moves(0, old, new, topology).moves
    return [(move.slot, move.logical_expert, move.kind, move.source_rank, move.source_slot) for move in moves]


def test_the_golden_move_plan() -> None:
    """Golden value A3 of the facts."""
    assert _found([0, 1, 2, 3, 4, 5, 0, 1], [1, 0, 0, 5, 0, 0, 4, 2], FOUR_GPUS) == [
        (0, 1, "same_gpu", 0, 1),
        (1, 0, "same_gpu", 0, 0),
        (2, 0, "same_node", 0, 0),
        (3, 5, "cross_node", 2, 5),
        (4, 0, "same_node", 3, 6),
        (5, 0, "free_rider", 2, 4),
        (6, 4, "same_node", 2, 4),
        (7, 2, "cross_node", 1, 2),
    ]


def test_slots_that_keep_their_expert_have_no_move() -> None:
    assert _found([0, 1, 2, 3, 4, 5, 0, 1], [0, 1, 2, 3, 4, 5, 0, 1], FOUR_GPUS) == []


def test_needing_ranks_are_cut_into_runs_and_the_first_holder_gets_the_longer_one() -> None:
    topology = Topology(num_gpus=6, num_nodes=1, num_physical_experts=6)
    moves = _found([0, 0, 1, 2, 3, 4], [0, 0, 0, 0, 0, 4], topology)
    assert [(move[0], move[3]) for move in moves] == [(2, 0), (3, 0), (4, 1)]


def test_dead_gpus_neither_send_nor_receive_and_a_lost_expert_comes_from_the_checkpoint() -> None:
    topology = Topology(num_gpus=3, num_nodes=1, num_physical_experts=6, active_gpus=(True, False, True))
    moves = _found([0, 1, 2, 3, 0, 1], [0, 1, 9, 9, 2, 3], topology)
    assert moves == [(4, 2, "checkpoint", -1, -1), (5, 3, "checkpoint", -1, -1)]


def test_following_the_moves_gives_the_new_placement() -> None:
    """Every kind of move, on random maps: what the sources hold is what the slots need."""
    rng = np.random.default_rng(11)
    for _ in range(50):
        old = rng.permutation(np.arange(8) % 6)
        new = rng.permutation(np.arange(8) % 6)
        slots = old.copy()
        for move in layer_moves(0, old.tolist(), new.tolist(), FOUR_GPUS).moves:
            assert move.source_rank == move.source_slot // 2
            content = slots if move.kind == "free_rider" else old
            slots[move.slot] = content[move.source_slot]
        assert slots.tolist() == new.tolist()


def test_only_layers_that_change_have_a_plan_and_bytes_are_by_kind() -> None:
    old = Placement.from_physical([[0, 1, 2, 3, 4, 5, 0, 1]] * 2, 6)
    new = Placement.from_physical([[0, 1, 2, 3, 4, 5, 0, 1], [1, 0, 0, 5, 0, 3, 4, 2]], 6)
    plans = move_plan(old, new, FOUR_GPUS)
    assert [plan.layer for plan in plans] == [1]
    sizes = plans[0].bytes_by_kind(10)
    assert sum(sizes.values()) == 10 * len(plans[0].moves)
    assert sizes["same_gpu"] == 20


def test_maps_of_other_shapes_have_no_moves() -> None:
    with pytest.raises(InvalidPlacement, match="no moves between slot maps"):
        move_plan(Placement.from_physical([[0, 1]], 2), Placement.from_physical([[0, 1, 1]], 2), FOUR_GPUS)
