"""Groups of a layer's switch: a few slots at a time, and every expert always lies somewhere."""

from __future__ import annotations

from collections import Counter

import numpy as np
from crossdock.eplb.switch_groups import switch_groups
from crossdock.move_plan import layer_moves
from crossdock.types.placement import Topology
from hypothesis import given, settings
from hypothesis import strategies as st

TOPOLOGY = Topology(num_gpus=4, num_nodes=2, num_physical_experts=24)
LOCAL = TOPOLOGY.slots_per_gpu


def groups_of(old: list[int], new: list[int], max_slots: int, max_replicas: int = 99) -> tuple[tuple[int, ...], ...]:
    moves = layer_moves(0, old, new, TOPOLOGY)
    return switch_groups(moves, old, slots_per_rank=LOCAL, max_slots=max_slots, max_replicas=max_replicas)


def states(old: list[int], new: list[int], groups: tuple[tuple[int, ...], ...]) -> list[Counter[int]]:
    """Replica counts after each group; the last state must be the new placement."""
    slots, found = list(old), []
    for group in groups:
        for slot in group:
            slots[slot] = new[slot]
        found.append(Counter(slots))
    assert slots == new
    return found


@settings(max_examples=100)
@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from([16, 22, 24]))
def test_no_expert_is_ever_without_a_slot(seed: int, max_slots: int, num_experts: int) -> None:
    rng = np.random.default_rng(seed)
    rest = 24 - num_experts
    old, new = (
        rng.permutation([*range(num_experts), *rng.integers(0, num_experts, rest).tolist()]).tolist() for _ in range(2)
    )
    groups = groups_of(old, new, max_slots)
    moved = [slot for group in groups for slot in group]
    assert sorted(moved) == [slot for slot in range(24) if old[slot] != new[slot]]
    for counts in states(old, new, groups):
        assert set(counts) == set(range(num_experts))


def test_groups_keep_to_their_size_where_experts_have_copies() -> None:
    old = [*range(16), *range(8)]
    new = [*range(16), *range(8, 16)]
    groups = groups_of(old, new, 2)
    # Slots 16 and 17 are on the third rank, the others on the fourth.
    assert [len(group) for group in groups] == [4, 2, 2]
    assert all(Counter(slot // LOCAL for slot in group).most_common(1)[0][1] == 2 for group in groups)


def test_a_swap_of_two_experts_without_copies_goes_at_once() -> None:
    old = [*range(24)]
    new = [7, *range(1, 7), 0, *range(8, 24)]
    assert groups_of(old, new, 1) == ((0, 7),)


def test_lists_that_are_full_do_not_overflow_in_between() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        pool = [*range(16), *rng.permutation(16)[:8].tolist()]
        old, new = (rng.permutation(pool).tolist() for _ in range(2))
        for counts in states(old, new, groups_of(old, new, 1, max_replicas=2)):
            assert max(counts.values()) <= 2
            assert len(counts) == 16
