"""What ``overlap.py`` makes of stages: two micro-batches in a row, and sums of spans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import attrs
from crossdock.observe.span_shares import WAIT, SpanShares
from crossdock.types.model import Op
from crossdock.types.observer import Span
from crossdock.types.step import ForwardMode
from crossdock.types.strategy import StagePlan, StrategyCapabilities

COMMUNICATION = ("dispatch", "combine", "wait")


@attrs.frozen
class Halves:
    """Two micro-batches one after the other: nothing hides, everything has the size that it has under ``two_batch``."""

    lends_sms: bool
    capabilities = StrategyCapabilities(micro_batches=2)

    def plan(self, ops: Sequence[Op], mode: ForwardMode) -> StagePlan:
        return StagePlan(stages=(tuple(ops),), spares_communication_sms=self.lends_sms)


def communication_ms(shares: SpanShares) -> float:
    """Of a pass: in operations that begin and finish transfers."""
    return sum(shares.category_us.get(category, 0.0) for category in COMMUNICATION) / 1e3


def waits_by_operation(spans: Sequence[Span]) -> dict[str, float]:
    """Milliseconds by the operation that waits."""
    found: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        if span.category == WAIT:
            found[f"{span.name} {span.micro_batch}"] += span.duration_us / 1e3
    return {name: round(ms, 2) for name, ms in sorted(found.items())}
