"""What the next window will look like, from the steps that were recorded.

Every forecaster but ``sum`` works on shares (each step's counts divided by the layer's total), so that a busy step does not
count more than a quiet one, and gives a load [L, E] whose scale means nothing.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np

from crossdock_eplb_algos._shared.arrays import Floats, numbers

ForecastName = Literal["sum", "last", "mean", "ewma", "margin", "auto"]
_AUTO_DECAYS: Final = (1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05)
_AUTO_STEPS = 32
"""Newest one-step errors by which ``auto`` judges a decay."""


def forecast_load(counts: Floats, name: ForecastName, *, decay: float, margin: float) -> Floats:
    """Expected load [L, E] from ``counts`` [S, L, E].

    - ``sum``: all steps are one window. ``last``: the next step is like the newest. ``mean``: like all before, equally.
    - ``ewma``: weights fall by (1 - decay) a step into the past.
    - ``margin``: ewma plus ``margin`` standard deviations, so that experts which jump about get room for it.
    - ``auto``: ``margin``'s rule with the decay, for the whole model, that would have predicted the newest steps best.
    """
    if name == "sum" or len(counts) == 1:
        return np.asarray(counts.sum(axis=0))
    if name == "last":
        return np.asarray(counts[-1])
    shares = counts / np.maximum(counts.sum(axis=2, keepdims=True), 1e-30)
    if name == "mean":
        return np.asarray(shares.mean(axis=0))
    if name == "auto":
        decay = _best_decay(shares)
    mean = _weighted(shares, decay)
    if name == "ewma":
        return mean
    spread = np.sqrt(_weighted((shares - mean) ** 2, decay))
    return mean + margin * spread


def _weighted(values: Floats, decay: float) -> Floats:
    age = numbers(len(values))[::-1]
    weights = np.power(1.0 - decay, age)
    return np.asarray(np.einsum("s,sle->le", weights / weights.sum(), values))


def _best_decay(shares: Floats) -> float:
    """The decay with the least squared error of one-step-ahead forecasts over the newest steps."""
    errors: list[float] = []
    for decay in _AUTO_DECAYS:
        state, weight = np.zeros_like(shares[0]), 0.0
        error = 0.0
        first_judged = max(1, len(shares) - _AUTO_STEPS)
        for step, share in enumerate(shares):
            if step >= first_judged:
                error += float(((state / weight - share) ** 2).sum())
            state = state * (1.0 - decay) + share
            weight = weight * (1.0 - decay) + 1.0
        errors.append(error)
    return _AUTO_DECAYS[int(np.argmin(errors))]
