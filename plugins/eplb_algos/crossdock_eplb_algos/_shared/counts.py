"""How many replicas each expert gets, before anything is put on a GPU.

``greedy_counts`` is DeepSeek's second step in closed form: giving one replica after the other to the expert with the
largest load per replica selects the largest values of the table load / k, so one partial sort replaces the loop.
``threshold_counts`` covers what the greedy rule misses: it minimises the hottest replica although replicas of a little
more than half a GPU's load pack worse than larger ones of which each GPU takes one.
"""

from __future__ import annotations

import numpy as np

from crossdock_eplb_algos._shared.arrays import Floats, Ints, layer_index, numbers
from crossdock_eplb_algos._shared.order import falling, rising


def max_copies(num_experts: int, num_slots: int, num_gpus: int) -> int:
    """Most replicas an expert may have: one a GPU, unless the slots cannot be filled that way."""
    return num_gpus if num_slots <= num_experts * num_gpus else num_slots


def picked_copies(load: Floats, spare: int, most: int) -> Ints:
    """The experts [L, spare] that get the extra replicas, in the order in which a greedy rule gives them out.

    ``load`` [L, E]; an expert never has more than ``most`` replicas. Ties go to the expert with fewer replicas, then to the
    hotter one, then to the lower number; a layer of zeros therefore gets its spare slots spread evenly.
    """
    hottest = falling(load)[:, : min(spare, load.shape[1])]
    # Extra copy k of the expert at rank r is picked only after (r + 1) * k - 1 others: the pairs below suffice.
    width = hottest.shape[1]
    copy, rank = np.divmod(numbers(min(spare, most - 1) * width), width)
    copy += 1
    possible = (rank + 1) * copy <= spare
    copy, rank = copy[possible], rank[possible]
    value = np.take_along_axis(load, hottest, axis=1)[:, rank] / copy
    picked = falling(value)[:, :spare]
    return np.take_along_axis(hottest, rank[picked], axis=1)


def greedy_counts(load: Floats, num_slots: int, most: int) -> Ints:
    """Replica counts [L, E], at most ``most`` each and ``num_slots`` a layer, that minimise the hottest replica."""
    num_layers, num_experts = load.shape
    counts = np.ones((num_layers, num_experts), dtype=np.int64)
    if num_slots > num_experts:
        flat = layer_index(num_layers) * num_experts + picked_copies(load, num_slots - num_experts, most)
        counts += np.bincount(flat.ravel(), minlength=counts.size).reshape(counts.shape)
    return counts


def threshold_counts(
    load: Floats, num_slots: int, num_gpus: int, threshold: float, *, spare_to_cold: bool
) -> tuple[Ints, Floats]:
    """Counts [L, E] such that no replica carries more than ``threshold`` of a GPU's mean load, where slots suffice.

    Left-over slots give a second copy to unsplit experts, the coldest or the hottest first. The second result [L] is
    zero where the slots suffice and infinite where they do not (those rows hold greedy counts).
    """
    mean = load.sum(axis=1, keepdims=True) / num_gpus
    share = np.divide(load, mean * threshold, out=np.zeros_like(load), where=mean > 0)
    counts = np.clip(np.ceil(share - 1e-9), 1, num_gpus).astype(np.int64)
    spare = num_slots - counts.sum(axis=1)
    unsplit = counts == 1
    order = rising(np.where(unsplit, load, np.inf)) if spare_to_cold else falling(np.where(unsplit, load + 1.0, 0.0))
    place = np.empty_like(order)
    place[layer_index(len(load)), order] = numbers(load.shape[1])
    fits = (spare >= 0) & (spare <= unsplit.sum(axis=1))
    counts += place < spare[:, None]
    if num_gpus < 2:
        fits &= spare == 0
    counts[~fits] = greedy_counts(load[~fits], num_slots, max_copies(load.shape[1], num_slots, num_gpus))
    return counts, np.where(fits, 0.0, np.inf)
