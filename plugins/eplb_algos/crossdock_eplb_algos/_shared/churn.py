"""From the placement in force to a better one with few moves.

One action a layer and round, always for the fullest GPU: a rewrite (a copy of a donor becomes a copy of one of the GPU's
experts, one move) or a swap with another GPU (two moves). The action with the largest fall of squared overload a move is
taken. A move is a (GPU, expert) weight that the GPU did not have in the placement in force; undoing one gives it back.
"""

from __future__ import annotations

import attrs
import numpy as np

from crossdock_eplb_algos._shared.arrays import Bools, Floats, Ints, numbers
from crossdock_eplb_algos._shared.packing import Packing
from crossdock_eplb_algos._shared.slots import membership
from crossdock_eplb_algos._shared.trades import Plan, best_trades, make_trades

_DONORS = 6
_LEAST_GAIN = 1e-9
_NOT = 1e30
_FEWEST_PARTNERS = 4
_REWRITE_BONUS = 2.0
"""A rewrite also brings replica counts up to date; measured on drifting loads, preferring it helps the next window."""


@attrs.frozen(kw_only=True, eq=False)
class MoveLimits:
    """What a layer may spend."""

    max_moves: Ints | None
    """[L] hard limit of each layer."""
    price: float
    """Fall of the fullest GPU's load, as a part of the mean, that one move must be worth."""


def fewest_moves(packing: Packing, load: Floats, counts: Ints, aim: Floats, enough: Floats, limits: MoveLimits) -> None:
    """Change ``packing`` and ``counts`` in place, by few moves.

    Load above ``aim`` [L] is what actions are chosen to remove. A layer walks until its fullest GPU is at most ``enough`` [L],
    its moves are spent or no action helps; of the states on the way the one with the least peak / mean + price * moves is
    kept, so never a worse one than the first.
    """
    num_layers, num_gpus, num_slots = packing.experts.shape
    mean = np.maximum(load.sum(axis=1) / num_gpus, 1e-30)
    home = membership(packing.experts, load.shape[1])
    plan = Plan(packing=packing, load=load, counts=counts, target=aim)
    layers = numbers(num_layers)
    moves = np.zeros(num_layers, dtype=np.int64)
    peak = packing.max_load()
    best, best_counts, best_cost = packing.rows(layers), counts.copy(), peak / mean
    for _ in range(2 * num_gpus * num_slots):
        layers = layers[peak[layers] > enough[layers]]
        if not layers.size:
            break
        left = np.full(layers.size, _NOT, dtype=np.float64)
        if limits.max_moves is not None:
            left[:] = limits.max_moves[layers] - moves[layers]
        done, spent = _act(plan, home, layers, left, num_gpus // 4)
        stuck = np.flatnonzero(~done)
        if stuck.size:
            done[stuck], spent[stuck] = _act(plan, home, layers[stuck], left[stuck], num_gpus)
        layers = layers[done]
        moves[layers] += spent[done]
        peak[layers] = packing.loads[layers].sum(axis=2).max(axis=1)
        cost = peak[layers] / mean[layers] + limits.price * moves[layers]
        better = cost < best_cost[layers] - _LEAST_GAIN
        improved = layers[better]
        best.overwrite(improved, packing.rows(improved))
        best_counts[improved], best_cost[improved] = counts[improved], cost[better]
    packing.overwrite(numbers(num_layers), best)
    counts[:] = best_counts


def _act(plan: Plan, home: Bools, layers: Ints, left: Floats, num_partners: int) -> tuple[Bools, Ints]:
    """Make the best action of each of ``layers`` [n]; which had one [n], and the moves they cost [n] (may be negative)."""
    packing, counts, load = plan.packing, plan.counts, plan.load
    over = packing.loads[layers].sum(axis=2) - plan.target[layers, None]
    now = (np.maximum(over, 0) ** 2).sum(axis=1)
    trades, after, trade_moves = best_trades(plan, home, layers, left, _DONORS)
    trade_score = _REWRITE_BONUS * (now - after) / np.maximum(trade_moves, 0.5)
    swap, after, swap_moves = _best_swaps(packing, home, layers, over, left, num_partners)
    swap_score = (now - after) / np.maximum(swap_moves, 0.5)

    worth = np.maximum(trade_score, swap_score) > _LEAST_GAIN * now
    by_trade = trade_score >= swap_score
    chosen = np.flatnonzero(worth & by_trade)
    if chosen.size:
        part, part_counts = packing.rows(layers[chosen]), counts[layers[chosen]]
        make_trades(part, load[layers[chosen]], part_counts, trades.rows(chosen))
        packing.overwrite(layers[chosen], part)
        counts[layers[chosen]] = part_counts
    chosen = np.flatnonzero(worth & ~by_trade)
    _swap(packing, layers[chosen], swap[chosen])
    return worth, np.where(by_trade, trade_moves, swap_moves)


def _best_swaps(
    packing: Packing, home: Bools, layers: Ints, over: Floats, left: Floats, num_partners: int
) -> tuple[Ints, Floats, Ints]:
    """The best swap of each layer's fullest GPU with one of the ``num_partners`` lightest ones.

    ``over`` [n, G] is each GPU's load above the aim. Returns GPU, slot, other GPU and other slot [n, 4], the squared overload after it [n] (infinite: none), its moves [n].
    """
    row = numbers(layers.size)
    now = (np.maximum(over, 0) ** 2).sum(axis=1)
    order = np.argsort(over, axis=1, kind="stable")
    top, light = order[:, -1], order[:, : min(max(_FEWEST_PARTNERS, num_partners), order.shape[1] - 1)]
    at = layers[:, None, None]
    experts, loads = packing.experts[layers[:, None], light], packing.loads[layers[:, None], light]
    mine, my_loads = packing.experts[layers, top][:, None, :], packing.loads[layers, top][:, None, :]
    over_top, over_light = over[row, top], over[row[:, None], light]
    delta = my_loads[..., None, :] - loads[..., None]
    rest = now[:, None] - np.maximum(over_top, 0)[:, None] ** 2 - np.maximum(over_light, 0) ** 2
    after = np.maximum(over_top[:, None, None, None] - delta, 0) ** 2
    after += np.maximum(over_light[:, :, None, None] + delta, 0) ** 2
    after += rest[:, :, None, None]
    # A move is counted where a GPU gets an expert that is not at home there, and given back where it loses one.
    at_top, at_light = ~home[at, top[:, None, None], experts], ~home[at, light[..., None], experts]
    moves = (at_top.astype(np.int8) - at_light)[..., None] + (
        (~home[at, light[..., None], mine]).astype(np.int8) - ~home[at, top[:, None, None], mine]
    )[:, :, None, :]
    same = experts[..., None] == mine[:, :, None, :]
    after[same.any(axis=2)[:, :, None, :] | same.any(axis=3)[..., None] | (moves > left[:, None, None, None])] = np.inf
    score = (now[:, None, None, None] - after) / np.maximum(moves, 0.5)
    partner, rest_of = np.divmod(score.reshape(layers.size, -1).argmax(axis=1), after[0, 0].size)
    slot, own = np.divmod(rest_of, after.shape[3])
    swap = np.stack((top, own, light[row, partner], slot), axis=1)
    return swap, after[row, partner, slot, own], moves[row, partner, slot, own].astype(np.int64)


def _swap(packing: Packing, layers: Ints, swap: Ints) -> None:
    top, own, gpu, slot = swap.T
    for array in (packing.experts, packing.loads):
        mine, theirs = array[layers, top, own].copy(), array[layers, gpu, slot].copy()
        array[layers, top, own], array[layers, gpu, slot] = theirs, mine
