"""The strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from crossdock.types.strategy import StagePlan, StrategyCapabilities

if TYPE_CHECKING:
    from crossdock.types.model import Op
    from crossdock.types.step import ForwardMode


class ByLayer:
    """Layers are stages; one micro-batch, nothing overlaps."""

    @property
    def capabilities(self) -> StrategyCapabilities:
        return StrategyCapabilities()

    def plan(self, ops: Sequence[Op], mode: ForwardMode) -> StagePlan:
        layers = dict.fromkeys(op.layer for op in ops)
        return StagePlan(stages=tuple(tuple(op for op in ops if op.layer == layer) for layer in layers))
