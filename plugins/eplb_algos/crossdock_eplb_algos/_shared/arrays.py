"""Array types of the planners; L layers, E logical experts, P slots, G GPUs, S = P / G slots a GPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def layer_index(num_layers: int) -> Ints:
    """Column of layer numbers [L, 1], to index [L, k] picks in an [L, n] array."""
    return np.arange(num_layers, dtype=np.int64)[:, None]
