"""Replica counts when each GPU has two slots.

Then the best packing of given counts is known: the heaviest replica sits with the lightest, the second heaviest with the
second lightest, and so on. So counts can be searched on sorted values alone.
"""

from __future__ import annotations

import numpy as np

from crossdock_eplb_algos._shared.arrays import Floats, Ints, layer_index, numbers
from crossdock_eplb_algos._shared.order import rising
from crossdock_eplb_algos._shared.packing import sorted_replicas

_LEAST_GAIN = 1e-6


def folded_peak(load: Floats, counts: Ints) -> Floats:
    """Load [L] of the fullest GPU when replicas are paired in the best way."""
    return _pairs_peak(sorted_replicas(load, counts)[1][:, ::-1])


def _pairs_peak(rising: Floats) -> Floats:
    """Fullest pair [...] of replica loads [..., P] in rising order.

    Copies of one expert on both sides of the middle would meet on a GPU. They are then parted from each other by the
    next pairs outwards: the heavier halves of those pairs get a middle replica each.
    """
    half = rising.shape[-1] // 2
    peak: Floats = (rising[..., half:] + rising[..., half - 1 :: -1]).max(axis=-1)
    meeting = rising[..., half - 1] == rising[..., half]
    if meeting.any():
        rows = rising[meeting]
        middle = rows[:, half]
        same = rows == middle[:, None]
        above, below = same[:, half:].sum(axis=1), same[:, :half].sum(axis=1)
        outermost = half + np.maximum(above, below) + np.minimum(above, below) - 1
        outside = outermost >= 2 * half
        parted = rows[numbers(len(rows)), np.where(outside, 0, outermost)] + middle
        peak[meeting] = np.maximum(peak[meeting], np.where(outside & (middle > 0), np.inf, parted))
    return peak


def search_folded_counts(load: Floats, counts: Ints, num_gpus: int, target: Floats, rounds: int, donors: int) -> Ints:
    """Counts [L, E] whose fullest pair is lower, by up to ``rounds`` single trades a layer from ``counts``.

    A round tries one more copy of either expert of the fullest pair or of the coldest expert, against one copy less of
    any of ``donors`` experts, and keeps the best. Layers at or below ``target`` [L] are left alone.
    """
    counts = counts.copy()
    layers = numbers(len(load))
    for _ in range(rounds):
        if not layers.size:
            break
        experts, values = sorted_replicas(load[layers], counts[layers])
        peak = _pairs_peak(values[:, ::-1])
        row = np.flatnonzero(peak > target[layers])
        if not row.size:
            break
        layers, experts, values, peak = layers[row], experts[row], values[row], peak[row]
        worst = (values[:, :num_gpus] + values[:, : num_gpus - 1 : -1]).argmax(axis=1)
        row = numbers(layers.size)
        receivers = np.stack((experts[row, worst], experts[row, -1 - worst], experts[:, -1]), axis=1)
        after, receiver, donor = _try_trades(load[layers], counts[layers], experts, values, receivers, donors)
        best = np.where((counts[layers[:, None], receiver] < num_gpus), after, np.inf).argmin(axis=1)
        better = after[row, best] < peak * (1 - _LEAST_GAIN)
        row, layers, best = row[better], layers[better], best[better]
        counts[layers, receiver[row, best]] += 1
        counts[layers, donor[row, best]] -= 1
    return counts


def _try_trades(
    load: Floats, counts: Ints, experts: Ints, values: Floats, receivers: Ints, donors: int
) -> tuple[Floats, Ints, Ints]:
    """Fullest pair [n, K], receiver [n, K] and donor [n, K] of every trade; impossible ones have an infinite load."""
    row = layer_index(len(experts))
    less = np.where(counts > 1, load / np.maximum(counts - 1, 1), np.inf)
    cheapest = rising(less)[:, :donors]
    receiver = np.repeat(receivers, cheapest.shape[1], axis=1)
    donor = np.tile(cheapest, (1, receivers.shape[1]))
    share = load[row, receiver] / (counts[row, receiver] + 1)
    trial = np.where(experts[:, None] == receiver[..., None], share[..., None], values[:, None])
    donor_share = less[row, donor]
    possible = np.isfinite(donor_share) & (receiver != donor)
    held = experts[:, None] == donor[..., None]
    np.copyto(trial, np.where(possible, donor_share, 0.0)[..., None], where=held)
    rewritten = held.argmax(axis=2)
    np.put_along_axis(trial, rewritten[..., None], share[..., None], axis=2)
    trial.sort(axis=2)
    return np.where(possible, _pairs_peak(trial), np.inf), receiver, donor
