"""The bit sort equals a stable argsort."""

from __future__ import annotations

import numpy as np
import pytest
from crossdock_eplb_algos._shared.order import falling, rising


@pytest.mark.parametrize("size", [1, 2, 7, 64, 257])
def test_it_sorts_as_a_stable_argsort_does_ties_included(size: int) -> None:
    values = np.random.default_rng(size).integers(0, 9, (20, size)).astype(np.float64)
    values[0] = np.inf
    values[1, ::2] = -0.0
    assert np.array_equal(rising(values), np.argsort(values, axis=1, kind="stable"))
    assert np.array_equal(falling(values), np.argsort(-values, axis=1, kind="stable"))


def test_it_leaves_the_values_as_they_are() -> None:
    values = np.array([[3.0, 1.0, 2.0]])
    assert rising(values).tolist() == [[1, 2, 0]]
    assert values.tolist() == [[3.0, 1.0, 2.0]]
