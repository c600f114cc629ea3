"""The strategy that overlaps nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from crossdock.types.strategy import StagePlan, StrategyCapabilities

if TYPE_CHECKING:
    from crossdock.types.model import Op
    from crossdock.types.step import ForwardMode


class SequentialStrategy:
    """Every op in declared order in one stage; the reference that other strategies are compared with."""

    @property
    def capabilities(self) -> StrategyCapabilities:
        return StrategyCapabilities()

    def plan(self, ops: Sequence[Op], mode: ForwardMode) -> StagePlan:
        return StagePlan(stages=(tuple(ops),))
