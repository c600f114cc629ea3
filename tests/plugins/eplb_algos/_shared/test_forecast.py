"""Forecasts."""

from __future__ import annotations

import numpy as np
import pytest
from crossdock.testing.expert_loads import LOADS
from crossdock_eplb_algos._shared.forecast import ForecastName, forecast_load

STEPS = np.array([[[8.0, 2.0]], [[30.0, 10.0]], [[1.0, 3.0]]])


def test_sum_adds_counts_and_last_takes_the_newest_step() -> None:
    assert forecast_load(STEPS, "sum", decay=0.3, margin=0.5).tolist() == [[39.0, 15.0]]
    assert forecast_load(STEPS, "last", decay=0.3, margin=0.5).tolist() == [[1.0, 3.0]]


def test_mean_counts_every_step_alike_whatever_its_size() -> None:
    np.testing.assert_allclose(forecast_load(STEPS, "mean", decay=0.3, margin=0.5), [[0.6, 0.4]])


def test_ewma_weights_fall_geometrically() -> None:
    weights = np.array([0.25, 0.5, 1.0])
    expected = (weights * np.array([0.8, 0.75, 0.25])).sum() / weights.sum()
    np.testing.assert_allclose(forecast_load(STEPS, "ewma", decay=0.5, margin=0.0)[0, 0], expected)
    np.testing.assert_allclose(forecast_load(STEPS, "ewma", decay=1.0, margin=0.0), [[0.25, 0.75]])


def test_margin_gives_more_to_experts_that_jump() -> None:
    steps = np.array([[[5.0, 1.0, 4.0]], [[5.0, 4.0, 1.0]]] * 4)
    plain = forecast_load(steps, "ewma", decay=0.1, margin=0.5)
    wide = forecast_load(steps, "margin", decay=0.1, margin=0.5)
    np.testing.assert_allclose(wide[0, 0], plain[0, 0])
    assert (wide[0, 1:] > plain[0, 1:]).all()


@pytest.mark.parametrize("name", ["sum", "last", "mean", "ewma", "margin", "auto"])
def test_one_step_and_layers_of_zeros_give_finite_loads(name: ForecastName) -> None:
    for counts in (np.ones((1, 2, 3)), np.zeros((4, 2, 3))):
        found = forecast_load(counts, name, decay=0.3, margin=0.5)
        assert np.isfinite(found).all() and (found >= 0).all()


def _error(name: ForecastName, counts: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    """Mean absolute error of the next step's shares, each forecast made from the steps before."""
    shares = counts / counts.sum(axis=2, keepdims=True)
    errors = []
    for step in range(8, len(counts) - 1):
        found = forecast_load(counts[: step + 1], name, decay=0.3, margin=0.0)
        errors.append(np.abs(found / found.sum(axis=1, keepdims=True) - shares[step + 1]).mean())
    return float(np.mean(errors))


def test_auto_is_near_the_better_of_short_and_long_memory_on_drift_and_on_topics() -> None:
    for kind in ("drift", "topics"):
        counts = LOADS[kind]((24, 3, 32), 2)
        assert _error("auto", counts) <= 1.05 * min(_error("last", counts), _error("ewma", counts))
