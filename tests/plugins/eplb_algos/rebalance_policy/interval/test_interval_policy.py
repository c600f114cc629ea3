"""The ``interval`` policy."""

from __future__ import annotations

import pytest
from crossdock.errors import ConfigValueError
from crossdock.rebalance import make_rebalance_policy
from crossdock.types.rebalance import RebalanceFacts


def test_it_rebalances_at_every_decision_with_a_recorded_load() -> None:
    policy = make_rebalance_policy("interval", {})
    decision = policy.choose(RebalanceFacts(steps_since_last=7, balancedness=1.0))
    assert decision.rebalance
    assert "7 passes" in decision.reason


def test_it_does_nothing_while_no_pass_was_recorded() -> None:
    decision = make_rebalance_policy("interval", {}).choose(RebalanceFacts(steps_since_last=0, balancedness=None))
    assert not decision.rebalance
    assert decision.reason == "no pass was recorded"


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigValueError, match="unknown key 'every'"):
        make_rebalance_policy("interval", {"every": 3})
