"""Gain against price; both are in the reason, the log, the metrics and the receipt."""

from __future__ import annotations

from crossdock.types.rebalance import RebalanceDecision, RebalanceFacts

from crossdock_eplb_algos.rebalance_policy.priced.options import PricedOptions


class PricedPolicy:
    """Yes when step time saved until the next decision is more than transfer and stall, by the margin."""

    def __init__(self, options: PricedOptions) -> None:
        self._options = options

    def choose(self, facts: RebalanceFacts) -> RebalanceDecision:
        gain_s, price_s = facts.predicted_gain_s, facts.price_s
        if facts.balancedness is None or gain_s is None or price_s is None:
            return RebalanceDecision(rebalance=False, reason="no pass was recorded or no plan was made")
        wanted_s = max(self._options.margin * price_s, self._options.min_gain_s)
        pays = gain_s > wanted_s
        relation = "is more than" if pays else "is not more than"
        reason = (
            f"the predicted gain of {gain_s:.6f} s {relation} the {wanted_s:.6f} s asked for (price {price_s:.6f} s)"
        )
        return RebalanceDecision(rebalance=pays, reason=reason)
