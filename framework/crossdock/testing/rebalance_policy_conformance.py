"""What must hold for a rebalance policy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from crossdock.rebalance import make_rebalance_policy
from crossdock.testing.conformance import PluginCase, check_of
from crossdock.types.rebalance import RebalanceDecision, RebalanceFacts


def _facts() -> Iterator[RebalanceFacts]:
    """With and without a window, a plan and a price."""
    for steps, balancedness, gain, price in itertools.product(
        (0, 1, 1000), (None, 0.0, 0.5, 1.0), (None, 0.0, 2.0), (None, 0.0, 1.0)
    ):
        yield RebalanceFacts(steps_since_last=steps, balancedness=balancedness, predicted_gain_s=gain, price_s=price)


def check_every_situation_gets_a_decision_with_a_reason(case: PluginCase) -> None:
    policy = make_rebalance_policy(case.name, case.options)
    for facts in _facts():
        decision = policy.choose(facts)
        assert isinstance(decision, RebalanceDecision), f"{facts} got no decision"
        assert decision.reason.strip(), f"the decision on {facts} has no reason"


def check_the_decision_depends_on_the_facts_alone(case: PluginCase) -> None:
    first, second = (make_rebalance_policy(case.name, case.options) for _ in range(2))
    everything = list(_facts())
    forward = [first.choose(facts).rebalance for facts in everything]
    backward = [second.choose(facts).rebalance for facts in reversed(everything)]
    assert forward == backward[::-1], "the policy remembers earlier questions"


CHECKS = (
    check_of(check_every_situation_gets_a_decision_with_a_reason),
    check_of(check_the_decision_depends_on_the_facts_alone),
)
