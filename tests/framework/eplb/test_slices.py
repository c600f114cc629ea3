"""Slices of a layer's moves: every byte once, nobody above the budget."""

from __future__ import annotations

from collections import Counter

import numpy as np
from crossdock.eplb.slices import MAX_CHUNKS, Chunk, layer_slices
from crossdock.move_plan import layer_moves
from crossdock.types.placement import Topology
from hypothesis import given, settings
from hypothesis import strategies as st

TOPOLOGY = Topology(num_gpus=4, num_nodes=2, num_physical_experts=24)
LOCAL = TOPOLOGY.slots_per_gpu


def slices_of(seed: int, slot_bytes: int, max_bytes: int) -> tuple[tuple[Chunk, ...], ...]:
    rng = np.random.default_rng(seed)
    old, new = (rng.permutation([*range(16), *rng.integers(0, 16, 8).tolist()]).tolist() for _ in range(2))
    moves = layer_moves(0, old, new, TOPOLOGY)
    return layer_slices(moves, slot_bytes=slot_bytes, max_bytes=max_bytes, slots_per_rank=LOCAL)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 500), st.integers(1, 600))
def test_every_byte_goes_once_and_no_rank_is_above_the_budget(seed: int, slot_bytes: int, max_bytes: int) -> None:
    slices = slices_of(seed, slot_bytes, max_bytes)
    covered: Counter[tuple[int, int]] = Counter()
    for chunks in slices:
        out: Counter[int] = Counter()
        into: Counter[int] = Counter()
        for chunk in chunks:
            out[chunk.move.source_rank] += chunk.num_bytes
            into[chunk.move.slot // LOCAL] += chunk.num_bytes
            covered.update((chunk.move.slot, byte) for byte in range(chunk.begin, chunk.end))
        assert max(out.values(), default=0) <= max_bytes
        assert max(into.values(), default=0) <= max_bytes
    moved = {chunk.move.slot for chunks in slices for chunk in chunks}
    assert set(covered) == {(slot, byte) for slot in moved for byte in range(slot_bytes)}
    assert set(covered.values()) <= {1}


def test_free_riders_are_in_no_slice() -> None:
    # Rank 1 needs expert 0 in two slots.
    topology = Topology(num_gpus=2, num_nodes=1, num_physical_experts=6)
    moves = layer_moves(0, [0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 0, 5], topology)
    assert [move.kind for move in moves.moves] == ["same_node", "free_rider"]
    ((chunk,),) = layer_slices(moves, slot_bytes=10, max_bytes=10, slots_per_rank=3)
    assert chunk.move.slot == 3


def test_a_slice_holds_a_bounded_number_of_transfers() -> None:
    experts = 200
    topology = Topology(num_gpus=2, num_nodes=1, num_physical_experts=2 * experts)
    old = [*range(2 * experts)]
    moves = layer_moves(0, old, [*range(experts, 2 * experts), *range(experts)], topology)
    slices = layer_slices(moves, slot_bytes=1, max_bytes=1_000_000, slots_per_rank=experts)
    assert len(slices) == -(-experts // MAX_CHUNKS)
    assert max(len(chunks) for chunks in slices) == 2 * MAX_CHUNKS


def test_nothing_to_move_gives_no_slice() -> None:
    moves = layer_moves(0, [0, 1, 2, 3], [0, 1, 2, 3], Topology(num_gpus=2, num_nodes=1, num_physical_experts=4))
    assert layer_slices(moves, slot_bytes=8, max_bytes=4, slots_per_rank=2) == ()
