"""Made-up expert loads of every kind that planners are judged on; counts [steps, layers, experts] float64, by seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.float64]
Shape = tuple[int, int, int]

_TOKENS: Final = 16_384


def _drawn(shares: Counts, seed: int) -> Counts:
    """Token counts around ``shares`` [steps, layers, experts]."""
    rng = np.random.default_rng(seed)
    shares = shares / shares.sum(axis=2, keepdims=True)
    return rng.poisson(shares * _TOKENS).astype(np.float64)


def _shuffled(row: Counts, shape: Shape, seed: int) -> Counts:
    """``row`` [experts] in another order in each layer, the same in all steps."""
    rng = np.random.default_rng(seed)
    layers = np.stack([rng.permutation(row) for _ in range(shape[1])])
    return np.broadcast_to(layers, shape).copy()


def _falling(shape: Shape, exponent: float) -> Counts:
    """[experts]: 1 / rank ** exponent."""
    return np.power(np.arange(1, shape[2] + 1, dtype=np.float64), -exponent)


def uniform(shape: Shape, seed: int = 0) -> Counts:
    """Every expert alike."""
    return _drawn(np.ones(shape), seed)


def zipf(shape: Shape, seed: int = 0, exponent: float = 1.0) -> Counts:
    """The expert at rank r has a share of 1 / r ** exponent."""
    return _drawn(_shuffled(_falling(shape, exponent), shape, seed), seed + 1)


def zipf_steep(shape: Shape, seed: int = 0) -> Counts:
    """Zipf with exponent 1.5, where greedy replica counts pack badly."""
    return zipf(shape, seed, 1.5)


def hot(shape: Shape, seed: int = 0) -> Counts:
    """One expert of each layer has half of the load."""
    row = np.ones(shape[2])
    row[0] = max(1, shape[2] - 1)
    return _drawn(_shuffled(row, shape, seed), seed + 1)


def dead(shape: Shape, seed: int = 0) -> Counts:
    """A quarter of the experts gets nothing."""
    row = _falling(shape, 0.7)
    row[: shape[2] // 4] = 0.0
    return _drawn(_shuffled(row, shape, seed), seed + 1)


def bursty(shape: Shape, seed: int = 0) -> Counts:
    """In each step other experts, one in 32, are twenty times hotter, in every second layer."""
    rng = np.random.default_rng(seed)
    shares = _shuffled(_falling(shape, 0.5), shape, seed + 1)
    for step in range(shape[0]):
        for layer in range(0, shape[1], 2):
            shares[step, layer, rng.choice(shape[2], max(1, shape[2] // 32), replace=False)] *= 20
    return _drawn(shares, seed + 2)


def drift(shape: Shape, seed: int = 0) -> Counts:
    """A skewed load that wanders: log shares follow an AR(1) process with correlation 0.9 a step."""
    rng = np.random.default_rng(seed)
    base = np.log(_shuffled(_falling(shape, 0.6), shape, seed + 1))
    noise = rng.normal(size=shape[1:])
    for step in range(shape[0]):
        base[step] += 0.35 * noise
        noise = 0.9 * noise + np.sqrt(1 - 0.9**2) * rng.normal(size=shape[1:])
    return _drawn(np.exp(base), seed + 2)


def topics(shape: Shape, seed: int = 0) -> Counts:
    """Each step is another mixture of a few topics, so that the last step says little about the next."""
    rng = np.random.default_rng(seed)
    profiles = np.exp(rng.normal(size=(5, *shape[1:])))
    mixture = rng.dirichlet(np.full(5, 0.4), size=shape[0])
    return _drawn(np.einsum("st,tle->sle", mixture, profiles), seed + 1)


LOADS: Final[dict[str, Callable[[Shape, int], Counts]]] = {
    "uniform": uniform,
    "zipf": zipf,
    "zipf_steep": zipf_steep,
    "hot": hot,
    "dead": dead,
    "bursty": bursty,
    "drift": drift,
    "topics": topics,
}
"""Every kind by name."""
