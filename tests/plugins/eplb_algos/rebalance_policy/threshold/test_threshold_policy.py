"""The ``threshold`` policy, line by line of its truth table (pitfall sglang#8345: the rule was read the wrong way round)."""

from __future__ import annotations

import pytest
from crossdock.errors import ConfigValueError
from crossdock.rebalance import make_rebalance_policy
from crossdock.types.rebalance import RebalanceFacts

TRUTH_TABLE = [
    (1.0, {1.0: False, 0.9: False, 0.8: False, 0.0: False}),
    (0.9, {1.0: True, 0.9: False, 0.8: False, 0.0: False}),
    (0.5, {1.0: True, 0.9: True, 0.8: True, 0.0: False}),
    (0.0, {1.0: True, 0.9: True, 0.8: True, 0.0: False}),
    (None, {1.0: False, 0.9: False, 0.8: False, 0.0: False}),
]


@pytest.mark.parametrize(
    ("balancedness", "below", "expected"),
    [(found, below, expected) for found, row in TRUTH_TABLE for below, expected in row.items()],
)
def test_it_rebalances_only_below_the_threshold(balancedness: float | None, below: float, expected: bool) -> None:
    policy = make_rebalance_policy("threshold", {"below": below})
    decision = policy.choose(RebalanceFacts(steps_since_last=100, balancedness=balancedness))
    assert decision.rebalance is expected
    if balancedness is not None:
        assert f"{balancedness:.4f}" in decision.reason
        assert f"{below:g}" in decision.reason


@pytest.mark.parametrize("below", [-0.1, 1.1, float("nan")])
def test_a_threshold_outside_0_to_1_is_refused(below: float) -> None:
    with pytest.raises(ConfigValueError, match="below must be from 0 to 1"):
        make_rebalance_policy("threshold", {"below": below})
