"""Between packings and slot maps: keep what is in place where it is."""

from __future__ import annotations

import numpy as np

from crossdock_eplb_algos._shared.arrays import Bools, Floats, Ints, layer_index, numbers
from crossdock_eplb_algos._shared.packing import Packing


def membership(experts: Ints, num_experts: int) -> Bools:
    """[L, G, E]: which experts each GPU of ``experts`` [L, G, S] holds."""
    held = np.zeros((*experts.shape[:2], num_experts), dtype=np.bool_)
    np.put_along_axis(held, experts, True, axis=2)
    return held


def moved_replicas(old: Ints, new: Ints, num_experts: int) -> Ints:
    """[L]: weights a plan loads, that is (GPU, expert) pairs of ``new`` [L, G, S] that ``old`` does not have."""
    moved: Ints = (membership(new, num_experts) & ~membership(old, num_experts)).sum(axis=(1, 2))
    return moved


def keep_slots(old: Ints, new: Ints) -> Ints:
    """``new`` [L, G, S] with each GPU's experts that it also held in ``old`` back in their old slots.

    The order inside a GPU has no meaning for balance; slots that keep their expert need no weight at all.
    """
    same = new[:, :, :, None] == old[:, :, None, :]
    place = np.full(new.shape, -1, dtype=np.int64)
    free = np.ones(old.shape, dtype=np.bool_)
    for slot in range(new.shape[2]):
        fits = same[:, :, slot] & free
        hit = fits.any(axis=2)
        target = fits.argmax(axis=2)
        place[:, :, slot] = np.where(hit, target, -1)
        layer, gpu = np.nonzero(hit)
        free[layer, gpu, target[layer, gpu]] = False
    # What did not hit takes the free slots, in order.
    place[place < 0] = np.nonzero(free)[2]
    kept = np.empty_like(new)
    np.put_along_axis(kept, place, new, axis=2)
    return kept


def relabel_gpus(old: Ints, new: Ints, num_experts: int) -> Ints:
    """For each GPU of ``old`` [L, G, S] the GPU of ``new`` that takes its place, [L, G], so that much stays where it is.

    Greedy: the pair of GPUs with most experts in common first. All GPUs are alike for balance.
    """
    num_layers, num_gpus = old.shape[:2]
    holders = np.ascontiguousarray(membership(old, num_experts).transpose(0, 2, 1)).view(np.uint8)
    row = numbers(num_layers)
    common = holders[row[:, None, None], new].sum(axis=2, dtype=np.int16).transpose(0, 2, 1).copy()
    chosen = np.empty((num_layers, num_gpus), dtype=np.int64)
    for _ in range(num_gpus):
        best = common.reshape(num_layers, -1).argmax(axis=1)
        old_gpu, new_gpu = np.divmod(best, num_gpus)
        chosen[row, old_gpu] = new_gpu
        common[row, old_gpu], common[row, :, new_gpu] = -1, -1
    return chosen


def relabelled(old: Ints, new: Packing, num_experts: int) -> Packing:
    """``new`` with its GPUs renamed to keep most of ``old`` [L, G, S] in place."""
    chosen = relabel_gpus(old, new.experts, num_experts)
    row = layer_index(len(old))
    return Packing(experts=new.experts[row, chosen], loads=new.loads[row, chosen])


def single_slot_map(counts: Ints, old: Ints) -> Ints:
    """Slot map [L, G] for one slot a GPU: every copy that ``old`` [L, G] already has stays, the rest fills the gaps."""
    num_layers, num_experts = counts.shape
    slots = old.copy()
    for layer in range(num_layers):
        wanted = counts[layer].copy()
        keep = np.zeros(old.shape[1], dtype=np.bool_)
        order = np.argsort(old[layer], kind="stable")
        held = np.bincount(old[layer], minlength=num_experts)
        experts = old[layer][order]
        first = (np.cumsum(held) - held)[experts]
        keep[order] = numbers(experts.size) - first < wanted[experts]
        wanted -= np.bincount(old[layer][keep], minlength=num_experts)
        slots[layer][~keep] = np.repeat(numbers(num_experts), wanted)
    return slots


def trivial_map(num_layers: int, num_experts: int, num_slots: int) -> Ints:
    """Slot i holds expert i mod E."""
    return np.tile(numbers(num_slots) % num_experts, (num_layers, 1))


def with_missing_experts(slots: Ints, load: Floats) -> tuple[Ints, Ints]:
    """``slots`` [L, P] with every expert of ``load`` [L, E] in it, and the slots [L] that were rewritten for that.

    A missing expert takes a slot of the expert that suffers least from one replica less.
    """
    num_experts = load.shape[1]
    slots, rewritten = slots.copy(), np.zeros(len(slots), dtype=np.int64)
    for layer in range(len(slots)):
        counts = np.bincount(slots[layer], minlength=num_experts)
        for expert in np.flatnonzero(counts == 0):
            donor = int(np.where(counts > 1, load[layer] / np.maximum(counts - 1, 1), np.inf).argmin())
            slots[layer, np.flatnonzero(slots[layer] == donor)[-1]] = expert
            counts[donor] -= 1
            counts[expert] += 1
            rewritten[layer] += 1
    return slots, rewritten
