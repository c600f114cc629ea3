"""Below the threshold yes, at it or above it no.

=================  =========  ======================================================
balancedness       threshold  rebalance
=================  =========  ======================================================
no pass recorded   any        no
1.0                1.0        no: nothing can be gained
0.9                1.0        yes
0.9                0.9        no: equality is good enough
0.89               0.9        yes
any                0.0        no: nothing is below 0
=================  =========  ======================================================
"""

from __future__ import annotations

from crossdock.types.rebalance import RebalanceDecision, RebalanceFacts


class ThresholdPolicy:
    """``below`` is the threshold."""

    def __init__(self, below: float) -> None:
        self._below = below

    def choose(self, facts: RebalanceFacts) -> RebalanceDecision:
        found = facts.balancedness
        if found is None:
            return RebalanceDecision(rebalance=False, reason="no pass was recorded")
        is_below = found < self._below
        relation = "is below" if is_below else "is not below"
        return RebalanceDecision(
            rebalance=is_below, reason=f"balancedness {found:.4f} {relation} the threshold {self._below:g}"
        )
