"""Rebalance policies: whether experts should move now (DESIGN section 10)."""

from __future__ import annotations

from typing import Protocol

import attrs


@attrs.frozen(kw_only=True)
class RebalanceFacts:
    """What is known when a policy is asked; equal on all ranks."""

    steps_since_last: int
    """Recorded passes since the last decision."""
    balancedness: float | None
    """Mean over layers of mean/max load over GPUs in the largest window; None while no pass was recorded."""
    predicted_gain_s: float | None = None
    """Step time that the finished plan saves until the next decision; None when no plan was made."""
    price_s: float | None = None
    """Bytes to move over the link rate, plus the predicted stall; None when no plan was made."""


@attrs.frozen(kw_only=True)
class RebalanceDecision:
    """A policy's answer."""

    rebalance: bool
    reason: str
    """One clause for log and receipt, with the numbers that decided."""


class RebalancePolicy(Protocol):
    """Pure: the same facts give the same decision on each rank."""

    def choose(self, facts: RebalanceFacts) -> RebalanceDecision: ...
