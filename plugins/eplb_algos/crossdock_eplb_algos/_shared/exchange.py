"""The ways in which two GPUs can exchange replicas, and the best of them for many pairs at once.

Exchange a * S + b swaps slot a of the first GPU for slot b of the second. With ``DOUBLE_SWAP_SLOTS`` slots, where single
swaps leave coarse steps and pairs are few, higher numbers stand for double swaps; see ``ExchangeTable``.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations

import attrs
import numpy as np

from crossdock_eplb_algos._shared.arrays import Bools, Floats, Ints, numbers

DOUBLE_SWAP_SLOTS = (4, 5)
_NEVER = 1e30
_FEW_SLOTS = 5


@attrs.frozen(kw_only=True, eq=False)
class ExchangeTable:
    """Exchanges of two GPUs with S slots, S one of ``DOUBLE_SWAP_SLOTS``."""

    leaving: Ints
    """[D, 2] pairs of the first GPU's slots in a double swap."""
    coming: Ints
    """[C, 2] pairs of the second GPU's slots."""
    order: Ints
    """[S * S + D * C, 2 S] new content of both GPUs (first GPU's slots, then second GPU's), as positions in the old."""


@lru_cache(maxsize=64)
def exchange_table(num_slots: int) -> ExchangeTable:
    """The exchanges of GPUs with ``num_slots`` slots, a number of ``DOUBLE_SWAP_SLOTS``."""
    coming = list(combinations(range(num_slots), 2))
    # With four slots, swapping the other two of each side gives the same split with the GPUs' names exchanged.
    leaving = [pair for pair in coming if num_slots > 4 or pair[0] == 0]
    rows = [_swapped(num_slots, (a,), (b,)) for a in range(num_slots) for b in range(num_slots)]
    rows += [_swapped(num_slots, a, b) for a in leaving for b in coming]
    return ExchangeTable(
        leaving=np.array(leaving, dtype=np.int64).reshape(-1, 2),
        coming=np.array(coming, dtype=np.int64).reshape(-1, 2),
        order=np.array(rows, dtype=np.int64).reshape(-1, 2 * num_slots),
    )


def _swapped(num_slots: int, mine: tuple[int, ...], theirs: tuple[int, ...]) -> list[int]:
    order = list(range(2 * num_slots))
    for a, b in zip(mine, theirs, strict=True):
        order[a], order[num_slots + b] = num_slots + b, a
    return order


def nearest_distance(first: Floats, second: Floats, half_gap: Floats) -> Floats:
    """How near the best exchange comes to moving ``half_gap`` [...] of load from ``first`` to ``second``, both [..., S].

    The result [...] is the fuller GPU's load above the pair's mean after that exchange.
    """
    num_slots = first.shape[-1]
    if num_slots > _FEW_SLOTS:
        gap = (first - half_gap[..., None])[..., :, None] - second[..., None, :]
        nearest: Floats = np.abs(gap, out=gap).reshape(*gap.shape[:-2], -1).min(axis=-1)
        return nearest
    # A minimum over short last axes has a cost a row; over leading axes it runs at vector speed.
    axes = (first.ndim - 1, *range(first.ndim - 1))
    first, second = np.ascontiguousarray(first.transpose(axes)), np.ascontiguousarray(second.transpose(axes))
    distance = _distances(first - half_gap, second)
    if num_slots in DOUBLE_SWAP_SLOTS:
        table = exchange_table(num_slots)
        leaving, coming = first[table.leaving].sum(axis=1), second[table.coming].sum(axis=1)
        np.minimum(distance, _distances(leaving - half_gap, coming), out=distance)
    return distance


def _distances(left: Floats, right: Floats) -> Floats:
    gap = left[:, None] - right[None, :]
    distance: Floats = np.abs(gap, out=gap).min(axis=(0, 1))
    return distance


def nearest_exchange(first: Floats, second: Floats, half_gap: Floats) -> tuple[Ints, Floats]:
    """Number [n] and distance [n] of the exchange that ``nearest_distance`` speaks of; both sides [n, S]."""
    gap = ((first - half_gap[:, None])[:, :, None] - second[:, None, :]).reshape(len(first), -1)
    if first.shape[1] in DOUBLE_SWAP_SLOTS:
        table = exchange_table(first.shape[1])
        leaving, coming = first[:, table.leaving].sum(axis=2), second[:, table.coming].sum(axis=2)
        double = ((leaving - half_gap[:, None])[:, :, None] - coming[:, None, :]).reshape(len(first), -1)
        gap = np.concatenate((gap, double), axis=1)
    np.abs(gap, out=gap)
    number = gap.argmin(axis=1)
    return number, gap[numbers(len(gap)), number]


def forbid(loads: Floats, banned: Bools, *, sign: float) -> Floats:
    """``loads`` with banned replicas moved out of reach; use opposite signs for the two sides of an exchange."""
    return np.where(banned, sign * _NEVER, loads)
