"""Replicas on GPUs: a state that the refinement steps change in place, and a first filling of it."""

from __future__ import annotations

import attrs
import numpy as np

from crossdock_eplb_algos._shared.arrays import Bools, Floats, Ints, layer_index, numbers
from crossdock_eplb_algos._shared.order import falling, rising


@attrs.define(kw_only=True, eq=False)
class Packing:
    """Which replica sits in which slot. ``loads`` always equals load / count of the expert in that slot."""

    experts: Ints
    """[L, G, S] logical expert of each slot."""
    loads: Floats
    """[L, G, S] tokens that the slot's replica gets when replicas share evenly."""

    def gpu_loads(self) -> Floats:
        """[L, G]."""
        return np.asarray(self.loads.sum(axis=2))

    def max_load(self) -> Floats:
        """[L] load of the fullest GPU."""
        return np.asarray(self.gpu_loads().max(axis=1))

    def rows(self, layers: Ints) -> Packing:
        """A copy of some layers (an index with repeats is fine)."""
        return Packing(experts=self.experts[layers], loads=self.loads[layers])

    def overwrite(self, layers: Ints, other: Packing) -> None:
        """Take the rows of ``other`` for these layers."""
        self.experts[layers] = other.experts
        self.loads[layers] = other.loads


def stacked(first: Packing, second: Packing) -> Packing:
    """Both states, one after the other along the layers."""
    return Packing(
        experts=np.concatenate((first.experts, second.experts)), loads=np.concatenate((first.loads, second.loads))
    )


def replica_counts(slots: Ints, num_experts: int) -> Ints:
    """[L, E]: how often each expert is in a slot map [L, P]."""
    flat = (layer_index(len(slots)) * num_experts + slots).ravel()
    return np.bincount(flat, minlength=len(slots) * num_experts).reshape(len(slots), num_experts)


def packing_of(slots: Ints, load: Floats, num_gpus: int) -> Packing:
    """The state of a slot map [L, P] under ``load`` [L, E]."""
    num_layers, num_slots = slots.shape
    shape = (num_layers, num_gpus, num_slots // num_gpus)
    per_copy = load / np.maximum(replica_counts(slots, load.shape[1]), 1)
    return Packing(
        experts=slots.reshape(shape).copy(), loads=np.take_along_axis(per_copy, slots, axis=1).reshape(shape)
    )


def sorted_replicas(load: Floats, counts: Ints) -> tuple[Ints, Floats]:
    """Experts [L, P] and loads [L, P] of all replicas, heaviest first, copies of one expert side by side."""
    num_layers = len(load)
    per_copy = load / counts
    order = falling(per_copy)
    repeats = np.take_along_axis(counts, order, axis=1)
    experts = np.repeat(order.ravel(), repeats.ravel()).reshape(num_layers, -1)
    return experts, np.take_along_axis(per_copy, experts, axis=1)


def deal(load: Floats, counts: Ints, num_gpus: int) -> Packing:
    """Deal the replicas of ``load`` [L, E] with ``counts`` [L, E]; see ``deal_sorted``."""
    return deal_sorted(*sorted_replicas(load, counts), num_gpus)


def deal_sorted(experts: Ints, loads: Floats, num_gpus: int) -> Packing:
    """Deal replicas [L, P], heaviest first, in rounds of G: each round's heaviest goes to the GPU that is lightest so far.

    Copies of an expert stand side by side and are at most G. Within a round each GPU takes one replica, so they can meet on a GPU
    only at the border of two rounds; there the second ones go to the lightest GPUs that have none.
    """
    num_layers = len(experts)
    row = layer_index(num_layers)
    experts, loads = experts.reshape(num_layers, -1, num_gpus), loads.reshape(num_layers, -1, num_gpus)
    num_rounds = experts.shape[1]
    spans = experts[:, 1:, 0] == experts[:, :-1, -1]
    gpu = np.empty((num_rounds, num_layers, num_gpus), dtype=np.int64)
    gpu[0] = numbers(num_gpus)
    # In the order of the round before: loads so far. Column i has the GPU that took the i-th heaviest replica of that round.
    total = loads[:, 0]
    for turn in range(1, num_rounds):
        lightest = rising(total)
        layers = np.flatnonzero(spans[:, turn - 1])
        if layers.size:
            lightest[layers] = _without_twins(lightest[layers], experts[layers, turn - 1 : turn + 1])
        total = total[row, lightest] + loads[:, turn]
        gpu[turn] = gpu[turn - 1][row, lightest]
    packing = Packing(
        experts=np.empty((num_layers, num_gpus, num_rounds), dtype=np.int64),
        loads=np.empty((num_layers, num_gpus, num_rounds)),
    )
    place = ((row * num_gpus + gpu) * num_rounds + numbers(num_rounds)[:, None, None]).transpose(1, 0, 2)
    packing.experts.reshape(-1)[place] = experts
    packing.loads.reshape(-1)[place] = loads
    return packing


def _without_twins(lightest: Ints, experts: Ints) -> Ints:
    """The order [n, G] in which replicas of a round take the places of the round before, for two rounds ``experts`` [n, 2, G].

    Both rounds have copies of the expert at their border: the last places of the one and the first replicas of the other.
    """
    border = experts[:, :1, -1]
    holds = np.take_along_axis(experts[:, 0] == border, lightest, axis=1)
    coming = (experts[:, 1] == border).sum(axis=1, keepdims=True)
    first = ~holds & (np.cumsum(~holds, axis=1) <= coming)
    return np.take_along_axis(lightest, np.argsort(~first, axis=1, kind="stable"), axis=1)


def has_twins(experts: Ints) -> Bools:
    """[...]: True where the last axis holds an expert twice."""
    ordered = np.sort(experts, axis=-1)
    return np.asarray((ordered[..., 1:] == ordered[..., :-1]).any(axis=-1))


def separate_copies(packing: Packing, layers: Ints) -> None:
    """Swap second copies on a GPU for the replica of nearest load on a GPU that has none, in these layers, in place."""
    for _ in range(packing.experts[0].size):
        twin_gpu = has_twins(packing.experts[layers])
        again = twin_gpu.any(axis=1)
        layers, twin_gpu = layers[again], twin_gpu[again]
        if not layers.size:
            return
        helped = _swap_one_twin(packing, layers, twin_gpu.argmax(axis=1))
        if not helped.all():
            _deal_by_expert(packing, layers[~helped])
        layers = layers[helped]


def _swap_one_twin(packing: Packing, layers: Ints, gpu: Ints) -> Bools:
    """One swap in each given layer [n]; False where none is possible."""
    row = numbers(layers.size)
    experts, loads = packing.experts[layers], packing.loads[layers]
    here = experts[row, gpu]
    same = here[:, :, None] == here[:, None, :]
    slot = np.tril(same, k=-1).any(axis=2).argmax(axis=1)
    twin = here[row, slot]
    away = ~(experts == twin[:, None, None]).any(axis=2, keepdims=True)
    fresh = ~(experts[..., None] == here[:, None, None, :]).any(axis=3)
    distance = np.where(away & fresh, np.abs(loads - loads[row, gpu, slot][:, None, None]), np.inf)
    flat = distance.reshape(layers.size, -1)
    best = flat.argmin(axis=1)
    possible = np.isfinite(flat[row, best])
    row, layers, gpu, slot = row[possible], layers[possible], gpu[possible], slot[possible]
    other_gpu, other_slot = np.divmod(best[possible], experts.shape[2])
    for array in (packing.experts, packing.loads):
        mine, theirs = array[layers, gpu, slot].copy(), array[layers, other_gpu, other_slot].copy()
        array[layers, gpu, slot] = theirs
        array[layers, other_gpu, other_slot] = mine
    return np.asarray(possible)


def _deal_by_expert(packing: Packing, layers: Ints) -> None:
    """Replica i of the list sorted by expert goes to GPU i mod G: never two copies where counts are at most G."""
    _, num_gpus, num_slots = packing.experts.shape
    shape = (layers.size, num_slots, num_gpus)
    experts = packing.experts[layers].reshape(layers.size, num_gpus * num_slots)
    order = np.argsort(experts, axis=1, kind="stable")
    loads = np.take_along_axis(packing.loads[layers].reshape(experts.shape), order, axis=1)
    experts = np.take_along_axis(experts, order, axis=1)
    packing.experts[layers] = experts.reshape(shape).transpose(0, 2, 1)
    packing.loads[layers] = loads.reshape(shape).transpose(0, 2, 1)
