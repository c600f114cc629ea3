"""The ``priced`` policy."""

from __future__ import annotations

import pytest
from crossdock.errors import ConfigValueError
from crossdock.rebalance import make_rebalance_policy
from crossdock.types.rebalance import RebalanceFacts


def facts(gain_s: float | None, price_s: float | None, balancedness: float | None = 0.7) -> RebalanceFacts:
    return RebalanceFacts(steps_since_last=100, balancedness=balancedness, predicted_gain_s=gain_s, price_s=price_s)


@pytest.mark.parametrize(
    ("gain_s", "price_s", "expected"),
    [(2.0, 1.0, True), (1.0, 1.0, False), (0.5, 1.0, False), (0.0, 0.0, False), (0.1, 0.0, True)],
)
def test_the_gain_must_be_more_than_the_price(gain_s: float, price_s: float, expected: bool) -> None:
    decision = make_rebalance_policy("priced", {}).choose(facts(gain_s, price_s))
    assert decision.rebalance is expected
    assert f"{gain_s:.6f}" in decision.reason
    assert f"{price_s:.6f}" in decision.reason


def test_a_margin_asks_for_a_profit_and_a_floor_for_an_amount() -> None:
    assert not make_rebalance_policy("priced", {"margin": 3.0}).choose(facts(2.0, 1.0)).rebalance
    assert make_rebalance_policy("priced", {"margin": 3.0}).choose(facts(3.1, 1.0)).rebalance
    assert not make_rebalance_policy("priced", {"min_gain_s": 5.0}).choose(facts(2.0, 1.0)).rebalance


@pytest.mark.parametrize("missing", [facts(None, 1.0), facts(1.0, None), facts(1.0, 0.1, balancedness=None)])
def test_without_a_plan_or_a_recorded_pass_nothing_moves(missing: RebalanceFacts) -> None:
    assert not make_rebalance_policy("priced", {}).choose(missing).rebalance


@pytest.mark.parametrize("options", [{"margin": -1.0}, {"min_gain_s": float("inf")}])
def test_wrong_amounts_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigValueError, match="must not be negative"):
        make_rebalance_policy("priced", options)
