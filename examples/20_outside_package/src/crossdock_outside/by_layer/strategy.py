"""The strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from crossdock.types.strategy import OverlapLimits, StagePlan, StrategyCapabilities

CAPABILITIES = StrategyCapabilities(micro_batches=2, graph_capture=False, overlap=OverlapLimits(is_gated=False))
"""Every step overlaps that can be cut in two, however small."""

if TYPE_CHECKING:
    from crossdock.types.model import Op
    from crossdock.types.step import ForwardMode


class ByLayer:
    """Layers are stages, and two micro-batches take turns: one computes a layer, then the other."""

    @property
    def capabilities(self) -> StrategyCapabilities:
        return CAPABILITIES

    def plan(self, ops: Sequence[Op], mode: ForwardMode) -> StagePlan:
        layers = dict.fromkeys(op.layer for op in ops)
        return StagePlan(stages=tuple(tuple(op for op in ops if op.layer == layer) for layer in layers))
