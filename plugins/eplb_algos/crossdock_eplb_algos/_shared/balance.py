"""From loads to a packing: counts, a first deal, and as much refinement as the effort allows."""

from __future__ import annotations

from typing import Final, Literal

import attrs
import numpy as np

from crossdock_eplb_algos._shared.arrays import Floats, Ints, numbers
from crossdock_eplb_algos._shared.counts import greedy_counts, max_copies, threshold_counts
from crossdock_eplb_algos._shared.fold import folded_peak, search_folded_counts
from crossdock_eplb_algos._shared.packing import Packing, deal, packing_of, stacked
from crossdock_eplb_algos._shared.pair_swaps import pair_swap_rounds
from crossdock_eplb_algos._shared.refine import exchange_rounds, shrinking_widths
from crossdock_eplb_algos._shared.steps import pack_evenly
from crossdock_eplb_algos._shared.trades import Plan, TradeEffort, trade_rounds

EffortName = Literal["fast", "default", "high"]


@attrs.frozen(kw_only=True)
class Effort:
    """How much work a plan may cost."""

    near: float
    """A layer is finished when its fullest GPU is at most this part above the target."""
    rounds: int
    """Exchange rounds after a deal; 0 means the two wide ones of the fast planner, and nothing else."""
    rounds_a_width: int
    pair_rounds: int = 0
    """Rounds of swaps of two replicas for two, where exchanges have come to an end."""
    thresholds: tuple[tuple[float, bool], ...] = ()
    """Other counts: largest replica as a part of the mean GPU load, and whether left-over slots go to cold experts."""
    trades: TradeEffort | None = None
    """Count trades, when a GPU has three slots or more."""
    trade_above: float = 0.0
    """They are tried for layers that stay this part above their mean."""
    trade_cells: int = 0
    """Slots, over all layers, of the layers that may trade."""
    folds: int
    """Count trades, when a GPU has two slots."""
    fold_donors: int
    fold_starts: int
    """Threshold counts to start from besides the greedy ones."""
    fold_cells: int
    """With more slots than this, over all layers and starts, only the greedy start is taken."""
    fold_limit: int = 1 << 30
    """With more slots than this, over all layers, counts are not searched at all."""
    link_tries: int = 12
    """Exchanges of copies that are tried to link a group of GPUs with another, where a plan is for such a picker."""


EFFORTS: Final[dict[EffortName, Effort]] = {
    "fast": Effort(
        near=1e-3,
        rounds=0,
        rounds_a_width=1,
        thresholds=((0.9, True), (1.0, False)),
        folds=2,
        fold_donors=4,
        fold_starts=2,
        fold_cells=2000,
        fold_limit=1000,
    ),
    "default": Effort(
        near=5e-4,
        rounds=16,
        rounds_a_width=3,
        pair_rounds=3,
        thresholds=((1.0, False), (0.9, True), (0.75, True), (0.66, True)),
        trades=TradeEffort(rounds=5, donors=6, trial_cells=8000, exchanges=7),
        trade_above=0.01,
        trade_cells=2400,
        folds=4,
        fold_donors=4,
        fold_starts=3,
        fold_cells=6000,
        link_tries=40,
    ),
    "high": Effort(
        near=2e-4,
        rounds=60,
        rounds_a_width=6,
        pair_rounds=12,
        thresholds=tuple(
            (part, cold)
            for part in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.66, 0.6, 0.5, 0.45, 0.4, 0.33, 0.25)
            for cold in (False, True)
        ),
        trades=TradeEffort(rounds=12, donors=8, trial_cells=16000, exchanges=16),
        trade_above=0.001,
        trade_cells=50_000,
        folds=16,
        fold_donors=8,
        fold_starts=6,
        fold_cells=60_000,
        link_tries=160,
    ),
}
_FAR = 0.3
"""A deal this much above its target, divided by the slots a GPU, is more than exchanges will put right."""
_MANY_SLOTS = 12
"""With more slots a GPU one wide round of exchanges is enough for the fast effort."""
_LAGGING = 1.05
"""The fast effort goes on with layers that are still this much above their target."""
_CLEARLY = 0.03
"""Deals say little about what exchanges reach: other counts must deal this much better to be taken."""


def balanced_packing(load: Floats, num_slots: int, num_gpus: int, effort: Effort) -> Packing:
    """A packing of ``load`` [L, E] into ``num_slots`` slots on ``num_gpus`` GPUs; each expert at least once."""
    counts = greedy_counts(load, num_slots, max_copies(load.shape[1], num_slots, num_gpus))
    if num_slots == num_gpus or num_gpus == 1:
        return deal(load, counts, num_gpus)
    mean = load.sum(axis=1) / num_gpus
    if num_slots == 2 * num_gpus:
        return _paired_packing(load, counts, num_gpus, mean, effort)
    packing = deal(load, counts, num_gpus)
    far = np.flatnonzero(packing.max_load() > mean * (1 + _FAR * num_gpus / num_slots))
    if far.size and num_slots == load.shape[1]:
        _pack_one_by_one(packing, load, far)
        far = far[:0]
    if effort.rounds:
        return _searched_packing(packing, load, counts, mean, far, effort)
    if far.size:
        _try_thresholds(packing, load, counts, mean, far, effort)
    widths = (max(1, num_gpus >> 2), max(1, num_gpus >> 3))
    target = np.maximum(mean, (load / counts).max(axis=1)) * (1 + effort.near)
    exchange_rounds(packing, target, widths[: 1 if num_slots > _MANY_SLOTS * num_gpus else 2])
    exchange_rounds(packing, target * _LAGGING, (1,) * 8)
    return packing


def _paired_packing(load: Floats, counts: Ints, num_gpus: int, mean: Floats, effort: Effort) -> Packing:
    """Two slots a GPU: the deal is the best packing of its counts, so counts are all there is to search."""
    is_searched = 2 * num_gpus * len(load) <= effort.fold_limit
    if is_searched:
        counts = _folded_counts(load, counts, num_gpus, mean * (1 + effort.near), effort)
    packing = deal(load, counts, num_gpus)
    target = np.maximum(mean, (load / counts).max(axis=1)) * (1 + effort.near)
    exchange_rounds(packing, target, (1, 1, 1, 1) if is_searched else (max(1, num_gpus >> 2),))
    return packing


def _pack_one_by_one(packing: Packing, load: Floats, layers: Ints) -> None:
    """Without spare slots, pack these layers replica by replica where that is better, in place: it wins on skewed loads."""
    num_gpus = packing.experts.shape[1]
    gpu, slot = pack_evenly(load[layers], num_gpus)
    slots = np.empty_like(gpu)
    np.put_along_axis(
        slots, gpu * packing.experts.shape[2] + slot, np.tile(numbers(load.shape[1]), (layers.size, 1)), 1
    )
    other = packing_of(slots, load[layers], num_gpus)
    better = np.flatnonzero(other.max_load() < packing.rows(layers).max_load())
    packing.overwrite(layers[better], other.rows(better))


def _searched_packing(packing: Packing, load: Floats, counts: Ints, mean: Floats, far: Ints, effort: Effort) -> Packing:
    """Three slots a GPU or more, from a first deal: threshold counts for ``far`` layers, exchanges, then trades."""
    num_layers, num_gpus, slots_a_gpu = packing.experts.shape
    layers = numbers(num_layers)
    if far.size:
        second, other, other_counts = _try_thresholds(packing, load, counts, mean, far, effort)
        layers = np.concatenate((layers, second))
        packing, counts = stacked(packing, other), np.concatenate((counts, other_counts))
    load, mean = load[layers], mean[layers]
    target = mean * (1 + effort.near)
    widths = shrinking_widths(num_gpus, effort.rounds, effort.rounds_a_width)
    target = np.maximum(target, (load / counts).max(axis=1))
    exchange_rounds(packing, target, widths)
    pair_swap_rounds(packing, target, effort.pair_rounds)
    if num_gpus * slots_a_gpu > load.shape[1]:
        _trade(packing, load, counts, mean, effort)
    if len(layers) > num_layers:
        peak = packing.max_load()
        better = np.flatnonzero(peak[num_layers:] < peak[layers[num_layers:]])
        packing.overwrite(layers[num_layers:][better], packing.rows(num_layers + better))
        packing = packing.rows(numbers(num_layers))
    return packing


def _other_counts(load: Floats, num_slots: int, num_gpus: int, effort: Effort) -> tuple[Ints, Floats]:
    """Threshold counts [T, L, E] and what to add to their fullest GPU [T, L]."""
    options = [
        threshold_counts(load, num_slots, num_gpus, part, spare_to_cold=cold) for part, cold in effort.thresholds
    ]
    return np.stack([counts for counts, _ in options]), np.stack([penalty for _, penalty in options])


def _try_thresholds(
    packing: Packing, load: Floats, counts: Ints, mean: Floats, layers: Ints, effort: Effort
) -> tuple[Ints, Packing, Ints]:
    """Deal ``layers``, whose greedy counts pack badly, with each of the threshold counts.

    A deal that is clearly better is taken, in place. Second choices that exchanges may turn into the better ones come
    back: their layers, packing and counts, the most overloaded layers as far as the effort goes.
    """
    num_gpus, num_slots = packing.experts.shape[1], packing.experts[0].size
    peak = packing.max_load()
    options, penalty = _other_counts(load[layers], num_slots, num_gpus, effort)
    dealt = deal(np.tile(load[layers], (len(options), 1)), options.reshape(-1, load.shape[1]), num_gpus)
    peaks = dealt.max_load().reshape(penalty.shape) + penalty
    best, row = peaks.argmin(axis=0), numbers(layers.size)
    found, found_counts = dealt.rows(best * layers.size + row), options[best, row]
    clear = peaks[best, row] < peak[layers] * (1 - _CLEARLY)
    packing.overwrite(layers[clear], found.rows(np.flatnonzero(clear)))
    counts[layers[clear]] = found_counts[clear]
    unclear = np.flatnonzero(~clear)
    over = peak[layers[unclear]] / np.maximum(mean[layers[unclear]], 1e-30)
    unclear = unclear[np.argsort(-over, kind="stable")][: max(1, effort.trade_cells // num_slots)]
    return layers[unclear], found.rows(unclear), found_counts[unclear]


def _trade(packing: Packing, load: Floats, counts: Ints, mean: Floats, effort: Effort) -> None:
    """Trades of single copies in the layers that are still far from their mean, the worst first."""
    over = packing.max_load() / np.maximum(mean, 1e-30)
    worst = np.argsort(-over, kind="stable")[: max(1, effort.trade_cells // packing.experts[0].size)]
    layers = worst[over[worst] > 1 + effort.trade_above]
    if layers.size and effort.trades is not None:
        part, part_counts = packing.rows(layers), counts[layers]
        target = mean[layers] * (1 + effort.near)
        trade_rounds(Plan(packing=part, load=load[layers], counts=part_counts, target=target), effort.trades)
        packing.overwrite(layers, part)


def _folded_counts(load: Floats, counts: Ints, num_gpus: int, target: Floats, effort: Effort) -> Ints:
    """Counts for two slots a GPU, searched from the greedy ones and from the most promising threshold counts."""
    starts = [counts]
    if 2 * num_gpus * len(load) * effort.fold_starts <= effort.fold_cells:
        options, penalty = _other_counts(load, 2 * num_gpus, num_gpus, effort)
        peaks = np.stack([folded_peak(load, option) for option in options]) + penalty
        order = np.argsort(peaks, axis=0, kind="stable")[: effort.fold_starts]
        starts += [options[choice, numbers(len(load))] for choice in order]
    found = search_folded_counts(
        np.tile(load, (len(starts), 1)),
        np.concatenate(starts),
        num_gpus,
        np.tile(target, len(starts)),
        effort.folds,
        effort.fold_donors,
    ).reshape(len(starts), *counts.shape)
    best = np.stack([folded_peak(load, option) for option in found]).argmin(axis=0)
    return np.asarray(found[best, numbers(len(load))])
