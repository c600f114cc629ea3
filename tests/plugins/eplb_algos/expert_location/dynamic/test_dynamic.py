"""The dynamic pick: by row where ranks hold the same rows, else spread and repeatable."""

from __future__ import annotations

import numpy as np
import torch
from crossdock.comm import local_comms
from crossdock.groups import rank_place, resolve_sizes
from crossdock.location import make_expert_location, placement_maps
from crossdock.types.location import Picker, PickerSpec
from crossdock.types.placement import Placement, Topology

SIZES = resolve_sizes(ranks=4, attn_dp_size=4)
SLOTS = np.array([[0, 1, 0, 2, 0, 3, 1, 3], [0, 1, 2, 3, 3, 3, 3, 3]])


def picker(*, replicated: bool, rank: int = 0, seed: int = 0, slots: np.ndarray = SLOTS) -> Picker:  # type: ignore[type-arg]
    spec = PickerSpec(
        maps=placement_maps(Placement.from_physical(slots, 4), torch.device("cpu")),
        topology=Topology(num_gpus=4, num_nodes=1, num_physical_experts=slots.shape[1]),
        sizes=SIZES,
        place=rank_place(SIZES, rank),
        comms=local_comms(),
        replicated_rows=replicated,
        seed=seed,
    )
    return make_expert_location("dynamic", {}, spec)


def test_with_the_same_rows_everywhere_the_row_number_decides() -> None:
    ids = torch.tensor([[0, 2], [0, 3], [0, 1], [0, 1]])
    for rank in range(4):
        picks = picker(replicated=True, rank=rank).pick(0, ids, 4)
        assert picks.tolist() == [[0, 3], [2, 7], [4, 1], [0, 6]]


def test_a_batch_of_one_row_takes_replica_0() -> None:
    found = picker(replicated=True)
    for _ in range(3):
        assert found.pick(0, torch.tensor([[0, 3]]), 1).tolist() == [[0, 5]]


def test_with_different_rows_replicas_get_even_shares() -> None:
    picks = picker(replicated=False).pick(1, torch.full((3000, 2), 3), 3000)
    shares = torch.bincount(picks.flatten(), minlength=8)[3:] / picks.numel()
    assert float((shares - 0.2).abs().max()) < 0.03


def test_ranks_layers_seeds_and_steps_pick_differently_and_a_run_repeats() -> None:
    ids = torch.full((64, 2), 3)
    base = picker(replicated=False)
    first, second = base.pick(1, ids, 64), base.pick(1, ids, 64)
    assert not torch.equal(first, second)
    assert not torch.equal(first, picker(replicated=False, rank=1).pick(1, ids, 64))
    assert not torch.equal(first, picker(replicated=False, seed=1).pick(1, ids, 64))
    again = picker(replicated=False)
    assert torch.equal(first, again.pick(1, ids, 64))
    assert torch.equal(second, again.pick(1, ids, 64))


def test_the_end_of_the_table_is_passed_without_a_gap() -> None:
    found = picker(replicated=False)
    ids = torch.full((30000, 2), 3)
    for _ in range(3):
        assert set(found.pick(1, ids, 30000).flatten().tolist()) == {3, 4, 5, 6, 7}


def test_without_replicas_there_is_one_answer() -> None:
    slots = np.array([[2, 0, 3, 1]])
    assert picker(replicated=False, slots=slots).pick(0, torch.tensor([[0, 1, 2, 3]]), 1).tolist() == [[1, 3, 0, 2]]


def test_the_router_is_left_alone() -> None:
    logits, bias = torch.randn(3, 4), torch.randn(4)
    found = picker(replicated=False).transform_router(logits, bias)
    assert found[0] is logits
    assert found[1] is bias
