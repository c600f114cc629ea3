"""Two replicas for two others: what still helps where no swap of single replicas of the fullest GPU does.

With 6 to 9 slots a GPU, pairs have hundreds of sums where single replicas have a dozen loads, so some pair nearly always fits.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from crossdock_eplb_algos._shared.arrays import Bools, Floats, Ints, numbers
from crossdock_eplb_algos._shared.exchange import forbid
from crossdock_eplb_algos._shared.order import rising
from crossdock_eplb_algos._shared.packing import Packing

FEWEST_SLOTS, MOST_SLOTS = 6, 9
"""Slots a GPU: with fewer, single exchanges look at pairs already; with more, single replicas fit nearly as well and pairs are too many."""
_CROWDED = 2
"""GPUs of a layer that swap in one round."""
_PARTNERS = 4
"""Light GPUs that each of them looks at."""
_LEAST_GAIN = 1e-6


def pair_swap_rounds(packing: Packing, target: Floats, rounds: int) -> None:
    """Rounds of swaps, in place, in layers whose fullest GPU is above ``target`` [L].

    Args:
        packing: with as many slots a GPU as this is made for; others are left as they are.
        target: a layer at or below it is finished.
        rounds: at most; a layer without a swap in one of them is finished, too.
    """
    num_layers, num_gpus, num_slots = packing.experts.shape
    if not FEWEST_SLOTS <= num_slots <= MOST_SLOTS or num_gpus < 2:
        return
    layers = numbers(num_layers)
    for _ in range(rounds):
        layers = layers[packing.rows(layers).max_load() > target[layers]]
        if not layers.size:
            return
        layers = layers[_round(packing, layers, target[layers])]


def _round(packing: Packing, layers: Ints, target: Floats) -> Bools:
    """One swap for each of the fullest GPUs of ``layers`` [n] that are above ``target`` [n]. Which layers [n] had one."""
    load = packing.loads[layers].sum(axis=2)
    num_layers, num_gpus = load.shape
    width = max(1, min(_CROWDED, num_gpus // 2))
    share = max(1, min(_PARTNERS, (num_gpus - width) // width))
    order = rising(load)
    crowded = order[:, num_gpus - width :]
    light = order[:, : width * share].reshape(num_layers, share, width).transpose(0, 2, 1)
    n, place = np.nonzero(np.take_along_axis(load, crowded, axis=1) > target[:, None])
    top, partners = crowded[n, place], light[n, place]
    mine, theirs = load[n, top], load[n[:, None], partners]

    # Pairs that leave and pairs that come; what would put an expert twice on a GPU is out of reach.
    experts, loads = packing.experts[layers], packing.loads[layers]
    same = experts[n, top][:, None, :, None] == experts[n[:, None], partners][:, :, None, :]
    first = forbid(np.broadcast_to(loads[n, top][:, None, :], same.shape[:3]), same.any(axis=3), sign=1.0)
    second = forbid(loads[n[:, None], partners], same.any(axis=2), sign=-1.0)
    pairs = np.array(list(combinations(range(experts.shape[2]), 2)), dtype=np.int64)
    leaving, coming = first[..., pairs].sum(axis=3), second[..., pairs].sum(axis=3)

    # The pair of pairs that comes nearest to half the difference.
    half_gap = (mine[:, None] - theirs) / 2
    distance = np.abs((leaving - half_gap[..., None])[..., :, None] - coming[..., None, :]).reshape(*half_gap.shape, -1)
    after = mine[:, None] - half_gap + distance.min(axis=2)
    row, choice = numbers(n.size), after.argmin(axis=1)
    good = after[row, choice] < mine * (1 - _LEAST_GAIN)
    row, choice = row[good], choice[good]
    own, other = np.divmod(distance[row, choice].argmin(axis=1), len(pairs))
    _swap(packing, layers[n[row]], (top[row], partners[row, choice]), (pairs[own], pairs[other]))
    helped = np.zeros(num_layers, dtype=np.bool_)
    helped[n[row]] = True
    return helped


def _swap(packing: Packing, layers: Ints, gpus: tuple[Ints, Ints], slots: tuple[Ints, Ints]) -> None:
    """Swaps slots [m, 2] of the first GPU [m] for those of the second."""
    layer = layers[:, None]
    mine, theirs = ((layer, gpu[:, None], slot) for gpu, slot in zip(gpus, slots, strict=True))
    for array in (packing.experts, packing.loads):
        array[mine], array[theirs] = array[theirs], array[mine].copy()
