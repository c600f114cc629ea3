"""Better balance by changing replica counts: one more copy for a crowded GPU's expert, one less for a donor.

A trade rewrites one slot: it held a copy of the donor and gets a copy of the receiver. All copies of both change their
share. What follows is left to ``exchange_rounds``, on a few trial copies of the layer at once.
"""

from __future__ import annotations

import attrs
import numpy as np

from crossdock_eplb_algos._shared.arrays import Floats, Ints, layer_index
from crossdock_eplb_algos._shared.packing import Packing
from crossdock_eplb_algos._shared.refine import exchange_rounds

_LEAST_GAIN = 1e-5
_MOST_TRIALS = 8


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


def trade_rounds(packing: Packing, load: Floats, counts: Ints, target: Floats, effort: TradeEffort) -> None:
    """Change ``packing`` and ``counts`` [L, E] in place while trades lower a layer's fullest GPU towards ``target`` [L]."""
    num_gpus, num_slots = packing.experts.shape[1:]
    layers = np.arange(len(load))
    peak = packing.max_load()
    for _ in range(effort.rounds):
        layers = layers[peak[layers] > target[layers]]
        if not layers.size:
            return
        trials = min(_MOST_TRIALS, max(2, effort.trial_cells // (layers.size * num_gpus * num_slots)))
        trades = _promising_trades(packing, load, counts, target, layers, (effort.donors, trials))
        if not trades.row.size:
            return
        trial_layers = layers[trades.row]
        trial, trial_counts = packing.rows(trial_layers), counts[trial_layers]
        _make_trades(trial, load[trial_layers], trial_counts, trades)
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
class _Trades:
    """Trades to try; all [n]. ``row`` numbers the layer among those asked about."""

    row: Ints
    receiver: Ints
    donor: Ints
    gpu: Ints


def _promising_trades(
    packing: Packing, load: Floats, counts: Ints, target: Floats, layers: Ints, donors_and_trials: tuple[int, int]
) -> _Trades:
    """The trades, so many a layer, with the least squared overload of all GPUs right after the trade."""
    num_donors, num_trials = donors_and_trials
    experts, gpu_load = packing.experts[layers], packing.loads[layers].sum(axis=2)
    load, counts = load[layers], counts[layers]
    row, num_gpus = layer_index(layers.size), experts.shape[1]
    receivers = experts[row[:, 0], gpu_load.argmax(axis=1)]
    less = np.where(counts > 1, load / np.maximum(counts - 1, 1), np.inf)
    donors = np.argsort(less, axis=1, kind="stable")[:, :num_donors]
    receiver_drop = np.take_along_axis(load / counts - load / (counts + 1), receivers, axis=1)
    receiver_share = np.take_along_axis(load / (counts + 1), receivers, axis=1)
    donor_rise = np.take_along_axis(less - load / counts, donors, axis=1)
    donor_share = np.take_along_axis(load / counts, donors, axis=1)
    has_receiver = (experts[:, None] == receivers[:, :, None, None]).any(axis=3)
    has_donor = (experts[:, None] == donors[:, :, None, None]).any(axis=3)
    # [n, receivers, donors, G]; the rewritten slot is on the lightest GPU that has the donor and lacks the receiver.
    open_gpu = has_donor[:, None] & ~has_receiver[:, :, None]
    gpu = np.where(open_gpu, gpu_load[:, None, None], np.inf).argmin(axis=3)
    after = (
        gpu_load[:, None, None]
        - (has_receiver * receiver_drop[..., None])[:, :, None]
        + np.where(has_donor, np.minimum(donor_rise, 1e30)[..., None], 0.0)[:, None]
    )
    change = receiver_share[:, :, None] - (donor_share + np.minimum(donor_rise, 1e30))[:, None]
    np.put_along_axis(
        after, gpu[..., None], np.take_along_axis(after, gpu[..., None], axis=3) + change[..., None], axis=3
    )
    overload = np.maximum(after - target[layers][:, None, None, None], 0)
    cost = np.where(open_gpu.any(axis=3), (overload * overload).sum(axis=3), np.inf)
    cost[~np.isfinite(np.broadcast_to(donor_rise[:, None], cost.shape))] = np.inf
    cost[(receivers[:, :, None] == donors[:, None]) | (np.take_along_axis(counts, receivers, axis=1) >= num_gpus)[..., None]] = np.inf
    flat = cost.reshape(layers.size, -1)
    best = np.argsort(flat, axis=1, kind="stable")[:, :num_trials]
    n, k = np.nonzero(np.isfinite(np.take_along_axis(flat, best, axis=1)))
    receiver, donor = np.divmod(best[n, k], donors.shape[1])
    return _Trades(row=n, receiver=receivers[n, receiver], donor=donors[n, donor], gpu=gpu[n, receiver, donor])


def _make_trades(packing: Packing, load: Floats, counts: Ints, trades: _Trades) -> None:
    row = np.arange(trades.row.size)
    slot = (packing.experts[row, trades.gpu] == trades.donor[:, None]).argmax(axis=1)
    packing.experts[row, trades.gpu, slot] = trades.receiver
    counts[row, trades.receiver] += 1
    counts[row, trades.donor] -= 1
    for expert in (trades.receiver, trades.donor):
        share = load[row, expert] / counts[row, expert]
        held = packing.experts == expert[:, None, None]
        np.copyto(packing.loads, share[:, None, None], where=held)
