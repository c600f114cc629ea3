"""Array types of the planners; L layers, E logical experts, P slots, G GPUs, S = P / G slots a GPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def numbers(count: int) -> Ints:
    """0, 1, ..., count - 1."""
    return np.arange(count, dtype=np.int64)


def layer_index(num_layers: int) -> Ints:
    """Column of layer numbers [L, 1], to index [L, k] picks in an [L, n] array."""
    return numbers(num_layers)[:, None]
