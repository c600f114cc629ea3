"""Always, as soon as there is a load to plan for."""

from __future__ import annotations

from crossdock.types.rebalance import RebalanceDecision, RebalanceFacts


class IntervalPolicy:
    """The interval between decisions is the whole rule."""

    def choose(self, facts: RebalanceFacts) -> RebalanceDecision:
        if facts.balancedness is None:
            return RebalanceDecision(rebalance=False, reason="no pass was recorded")
        return RebalanceDecision(
            rebalance=True,
            reason=f"{facts.steps_since_last} passes since the last decision, balancedness {facts.balancedness:.4f}",
        )
