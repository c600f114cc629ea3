"""Better balance by changing replica counts: one more copy for a crowded GPU's expert, one less for a donor.

A trade rewrites one slot: it held a copy of the donor and gets a copy of the receiver. All copies of both change their
share. What follows is left to ``exchange_rounds``, on a few trial copies of the layer at once.
"""

from __future__ import annotations

import attrs
import numpy as np

from crossdock_eplb_algos._shared.arrays import Bools, Floats, Ints, layer_index, numbers
from crossdock_eplb_algos._shared.order import rising
from crossdock_eplb_algos._shared.packing import Packing
from crossdock_eplb_algos._shared.refine import exchange_rounds

_LEAST_GAIN = 1e-5
_MOST_TRIALS = 8


@attrs.frozen(kw_only=True, eq=False)
class Plan:
    """A packing that is being improved, with what it is for; the arrays are changed in place."""

    packing: Packing
    load: Floats
    """[L, E]."""
    counts: Ints
    """[L, E] replicas in the packing."""
    target: Floats
    """[L] load of a GPU above which it is crowded."""


@attrs.frozen(kw_only=True)
class TradeEffort:
    """How hard to look for trades."""

    rounds: int
    """Trades a layer may make."""
    donors: int
    """Experts with spare copies that are looked at a trade."""
    trial_cells: int
    """Slots, over all layers, of the trial packings that are worked out a round; at least two a layer are."""
    exchanges: int
    """Exchange rounds after a trade."""


def trade_rounds(plan: Plan, effort: TradeEffort) -> None:
    """Change the plan in place while trades lower a layer's fullest GPU towards its target."""
    packing, load, counts, target = plan.packing, plan.load, plan.counts, plan.target
    num_gpus, num_slots = packing.experts.shape[1:]
    layers = numbers(len(load))
    peak = packing.max_load()
    for _ in range(effort.rounds):
        layers = layers[peak[layers] > target[layers]]
        if not layers.size:
            return
        trials = min(_MOST_TRIALS, max(2, effort.trial_cells // (layers.size * num_gpus * num_slots)))
        trades = _promising_trades(plan, layers, effort.donors, trials)
        if not trades.row.size:
            return
        trial_layers = layers[trades.row]
        trial, trial_counts = packing.rows(trial_layers), counts[trial_layers]
        make_trades(trial, load[trial_layers], trial_counts, trades)
        widths = [max(1, num_gpus >> 3)] * (effort.exchanges // 3) + [1] * (effort.exchanges - effort.exchanges // 3)
        exchange_rounds(trial, target[trial_layers], widths)
        after = trial.max_load()
        order = np.lexsort((after, trades.row))
        first = order[np.unique(trades.row[order], return_index=True)[1]]
        first = first[after[first] < peak[trial_layers[first]] * (1 - _LEAST_GAIN)]
        layers = trial_layers[first]
        packing.overwrite(layers, trial.rows(first))
        counts[layers] = trial_counts[first]
        peak[layers] = after[first]


@attrs.frozen(kw_only=True, eq=False)
class Trades:
    """Trades to make; all [n]. ``row`` numbers the layer among those asked about."""

    row: Ints
    receiver: Ints
    donor: Ints
    gpu: Ints

    def rows(self, chosen: Ints) -> Trades:
        """Some of them."""
        return Trades(
            row=self.row[chosen], receiver=self.receiver[chosen], donor=self.donor[chosen], gpu=self.gpu[chosen]
        )


@attrs.frozen(kw_only=True, eq=False)
class _Candidates:
    """Trades of n layers: R receivers (the fullest GPU's experts) by D donors (cheapest to take a copy from)."""

    receivers: Ints
    """[n, R]."""
    donors: Ints
    """[n, D]."""
    gpu: Ints
    """[n, R, D] where the rewritten slot is."""
    cost: Floats
    """[n, R, D] squared overload of all GPUs right after the trade; infinite where it is impossible."""


def _candidates(plan: Plan, layers: Ints, num_donors: int) -> _Candidates:
    experts, gpu_load = plan.packing.experts[layers], plan.packing.loads[layers].sum(axis=2)
    load, counts = plan.load[layers], plan.counts[layers]
    row, num_gpus = layer_index(layers.size), experts.shape[1]
    receivers = experts[row[:, 0], gpu_load.argmax(axis=1)]
    less = np.where(counts > 1, load / np.maximum(counts - 1, 1), np.inf)
    donors = rising(less)[:, :num_donors]
    share = load[row, receivers] / (counts[row, receivers] + 1)
    drop = load[row, receivers] / counts[row, receivers] - share
    donor_share = load[row, donors] / counts[row, donors]
    possible = np.isfinite(less[row, donors])
    rise = np.where(possible, less[row, donors], 0) - donor_share
    has_receiver = (experts[:, None] == receivers[:, :, None, None]).any(axis=3)
    has_donor = (experts[:, None] == donors[:, :, None, None]).any(axis=3)
    # [n, R, D, G]; the rewritten slot is on the lightest GPU that has the donor and lacks the receiver.
    open_gpu = has_donor[:, None] & ~has_receiver[:, :, None]
    gpu = np.where(open_gpu, gpu_load[:, None, None], np.inf).argmin(axis=3)
    base = gpu_load - plan.target[layers][:, None]
    after = (base[:, None] - has_receiver * drop[..., None])[:, :, None] + (has_donor * rise[..., None])[:, None]
    grid = np.ogrid[: layers.size, : receivers.shape[1], : donors.shape[1]]
    after[grid[0], grid[1], grid[2], gpu] += share[:, :, None] - (donor_share + rise)[:, None]
    np.maximum(after, 0, out=after)
    impossible = ~open_gpu.any(axis=3) | ~possible[:, None] | (receivers[:, :, None] == donors[:, None])
    impossible |= (counts[row, receivers] >= num_gpus)[..., None]
    cost = np.where(impossible, np.inf, np.einsum("ijkg,ijkg->ijk", after, after))
    return _Candidates(receivers=receivers, donors=donors, gpu=gpu, cost=cost)


def _promising_trades(plan: Plan, layers: Ints, num_donors: int, num_trials: int) -> Trades:
    """The trades, so many a layer, with the least squared overload of all GPUs right after the trade."""
    found = _candidates(plan, layers, num_donors)
    flat = found.cost.reshape(layers.size, -1)
    best = rising(flat)[:, :num_trials]
    n, k = np.nonzero(np.isfinite(flat[layer_index(layers.size), best]))
    receiver, donor = np.divmod(best[n, k], found.donors.shape[1])
    return Trades(
        row=n, receiver=found.receivers[n, receiver], donor=found.donors[n, donor], gpu=found.gpu[n, receiver, donor]
    )


def best_trades(plan: Plan, home: Bools, layers: Ints, left: Floats, num_donors: int) -> tuple[Trades, Floats, Ints]:
    """For each of ``layers`` [n] the trade with the largest fall of overload a move.

    ``home`` [L, G, E] says which weights cost no move, ``left`` [n] how many moves a layer has left. Returns the trades, the
    squared overload after each [n] (infinite where there is none) and their moves [n].
    """
    found = _candidates(plan, layers, num_donors)
    where = layers[:, None, None]
    gets = ~home[where, found.gpu, found.receivers[:, :, None]]
    loses = ~home[where, found.gpu, found.donors[:, None]]
    moves = gets.astype(np.int64) - loses
    cost = np.where(moves > left[:, None, None], np.inf, found.cost)
    best = (cost * np.maximum(moves, 0.5)).reshape(layers.size, -1).argmin(axis=1)
    row = numbers(layers.size)
    receiver, donor = np.divmod(best, found.donors.shape[1])
    trades = Trades(
        row=row,
        receiver=found.receivers[row, receiver],
        donor=found.donors[row, donor],
        gpu=found.gpu[row, receiver, donor],
    )
    return trades, cost[row, receiver, donor], moves[row, receiver, donor]


def make_trades(packing: Packing, load: Floats, counts: Ints, trades: Trades) -> None:
    """Make one trade in each layer, in place; row i of all arguments belongs to trade i."""
    row = numbers(trades.row.size)
    slot = (packing.experts[row, trades.gpu] == trades.donor[:, None]).argmax(axis=1)
    packing.experts[row, trades.gpu, slot] = trades.receiver
    counts[row, trades.receiver] += 1
    counts[row, trades.donor] -= 1
    for expert in (trades.receiver, trades.donor):
        share = load[row, expert] / counts[row, expert]
        held = packing.experts == expert[:, None, None]
        np.copyto(packing.loads, share[:, None, None], where=held)
