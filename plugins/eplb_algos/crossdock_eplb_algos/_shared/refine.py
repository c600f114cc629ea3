"""Better balance by exchanging replicas between GPUs; counts stay as they are.

All layers advance together. In one round the K fullest GPUs of a layer each make one exchange with the best of its own
share of the other GPUs. Large K spreads load fast while much is wrong; small K gives each crowded GPU more partners to
choose from, which is what helps at the end.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from crossdock_eplb_algos._shared.arrays import Bools, Floats, Ints, numbers
from crossdock_eplb_algos._shared.exchange import (
    DOUBLE_SWAP_SLOTS,
    exchange_table,
    forbid,
    nearest_distance,
    nearest_exchange,
)
from crossdock_eplb_algos._shared.order import rising
from crossdock_eplb_algos._shared.packing import Packing, has_twins

_LEAST_GAIN = 1e-6
"""Relative gain below which an exchange is not worth making (and could repeat for ever by rounding)."""

_MOST_SLOTS = 24
"""Partners are compared by so many of their slots; with more slots than that any partner has a replica that fits."""


def shrinking_widths(num_gpus: int, rounds: int, rounds_a_width: int) -> list[int]:
    """Values of K for ``rounds`` rounds: G / 2, halved every ``rounds_a_width`` rounds, down to 1."""
    return [max(1, num_gpus // 2 >> turn // rounds_a_width) for turn in range(rounds)]


def exchange_rounds(packing: Packing, target: Floats, widths: Iterable[int]) -> None:
    """One round for each K of ``widths``, in place, until a layer's fullest GPU is at most ``target`` [L].

    A layer also stops when K is 1 and no exchange of its fullest GPU helps.
    """
    num_gpus = packing.experts.shape[1]
    if packing.experts.shape[2] < 2 or num_gpus < 2:
        return
    layers = numbers(len(packing.experts))
    load = packing.gpu_loads()
    for turn, width in enumerate(widths):
        open_layers = load.max(axis=1) > target[layers]
        if not open_layers.all():
            layers, load = layers[open_layers], load[open_layers]
        if not layers.size:
            return
        order = rising(load)
        share = (num_gpus - width) // width
        turned = (numbers(share * width) - turn) % (share * width)
        others = order[:, turned].reshape(layers.size, share, width).transpose(0, 2, 1)
        helped = _exchange_round(packing, layers, order[:, num_gpus - width :], others, load)
        if width == 1:
            layers, load = layers[helped], load[helped]


def _exchange_round(packing: Packing, layers: Ints, crowded: Ints, others: Ints, load: Floats) -> Bools:
    """One exchange for each of ``crowded`` [n, K] with one of ``others`` [n, K, share]; updates ``load`` [n, G].

    Returns which layers [n] had an exchange.
    """
    num_layers, width, share = others.shape
    n = np.repeat(numbers(num_layers), width)
    top, candidates = crowded.ravel(), others.reshape(num_layers * width, share)
    mine = load[n, top]
    first = packing.loads[layers[n], top]
    if share > 1:
        middle = (mine[:, None] + load[n[:, None], candidates]) / 2
        second = packing.loads[layers[n][:, None], candidates]
        if second.shape[2] > _MOST_SLOTS:
            second = second[:, :, :: second.shape[2] // _MOST_SLOTS]
        after = middle + nearest_distance(first[:, None, :], second, mine[:, None] - middle)
        row, choice = numbers(len(n)), after.argmin(axis=1)
        partner = candidates[row, choice]
        good = np.flatnonzero(after[row, choice] < mine * (1 - _LEAST_GAIN))
        n, top, partner, mine, first = n[good], top[good], partner[good], mine[good], first[good]
    else:
        partner = candidates[:, 0]
    helped = np.zeros(num_layers, dtype=np.bool_)
    if not n.size:
        return helped
    half_gap = (mine - load[n, partner]) / 2
    number, rest = nearest_exchange(first, packing.loads[layers[n], partner], half_gap)
    good = rest < half_gap - _LEAST_GAIN * mine
    n, top, partner = n[good], top[good], partner[good]
    done = apply_exchange(packing, layers[n], top, partner, number[good])
    if width == 1 and not done.all():
        again = np.flatnonzero(~done)
        partner[again], done[again] = _exchange_without_twins(packing, layers[n[again]], top[again], load[n[again]])
    n, top, partner = n[done], top[done], partner[done]
    for gpu in (top, partner):
        load[n, gpu] = packing.loads[layers[n], gpu].sum(axis=1)
    helped[n] = True
    return helped


def _exchange_without_twins(packing: Packing, layers: Ints, top: Ints, load: Floats) -> tuple[Ints, Bools]:
    """The best exchange of ``top`` [n] that puts no expert twice on a GPU: partner [n] and whether it was made [n]."""
    row = numbers(layers.size)
    experts, loads = packing.experts[layers], packing.loads[layers]
    same = experts[row, top][:, None, :, None] == experts[:, :, None, :]
    mine = load[row, top]
    middle = (mine[:, None] + load) / 2
    first = forbid(loads[row, top][:, None, :], same.any(axis=3), sign=1.0)
    second = forbid(loads, same.any(axis=2), sign=-1.0)
    after = middle + nearest_distance(first, second, mine[:, None] - middle)
    after[row, top] = np.inf
    partner = after.argmin(axis=1)
    good = after[row, partner] < mine * (1 - _LEAST_GAIN)
    if good.any():
        row, chosen = row[good], partner[good]
        number, _ = nearest_exchange(first[row, chosen], second[row, chosen], mine[good] - middle[row, chosen])
        good[good] = apply_exchange(packing, layers[good], top[good], chosen, number)
    return partner, good


def apply_exchange(packing: Packing, layers: Ints, first: Ints, second: Ints, number: Ints) -> Bools:
    """Make exchange ``number`` between GPUs ``first`` and ``second`` of each layer, unless it puts twins on a GPU.

    All arguments [n]; the (layer, GPU) pairs must be distinct. Returns which were made [n].
    """
    num_slots = packing.experts.shape[2]
    if num_slots in DOUBLE_SWAP_SLOTS:
        return _apply_any(packing, layers, first, second, number)
    own, other = np.divmod(number, num_slots)
    experts, loads = packing.experts, packing.loads
    mine, theirs = experts[layers, first, own], experts[layers, second, other]
    fine = ~(experts[layers, second] == mine[:, None]).any(axis=1) & ~(experts[layers, first] == theirs[:, None]).any(
        axis=1
    )
    layers, first, second, own, other = layers[fine], first[fine], second[fine], own[fine], other[fine]
    experts[layers, first, own], experts[layers, second, other] = theirs[fine], mine[fine]
    mine_load, their_load = loads[layers, first, own], loads[layers, second, other]
    loads[layers, first, own], loads[layers, second, other] = their_load, mine_load
    return np.asarray(fine)


def _apply_any(packing: Packing, layers: Ints, first: Ints, second: Ints, number: Ints) -> Bools:
    """As ``apply_exchange``, for exchanges of more than one replica too."""
    _, num_gpus, num_slots = packing.experts.shape
    experts, loads = packing.experts.reshape(-1), packing.loads.reshape(-1)
    slot = numbers(num_slots)
    start = layers[:, None] * num_gpus
    place = np.concatenate(
        ((start + first[:, None]) * num_slots + slot, (start + second[:, None]) * num_slots + slot), axis=1
    )
    order = exchange_table(num_slots).order[number]
    source = place[numbers(len(place))[:, None], order]
    new_experts = experts[source]
    fine = ~has_twins(new_experts.reshape(-1, 2, num_slots)).any(axis=1)
    place, source = place[fine], source[fine]
    experts[place], loads[place] = new_experts[fine], loads[source]
    return np.asarray(fine)
