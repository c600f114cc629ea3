"""Operation strategies: how the declared ops of micro-batches are ordered (DESIGN section 9; the facts, section 7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs

from crossdock.types.model import Op
from crossdock.types.step import ForwardMode


@attrs.frozen(kw_only=True)
class StrategyCapabilities:
    """What a strategy needs from the dispatcher and the device."""

    micro_batches: int = 1
    """Dispatcher slots needed at once."""
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    graph_capture: bool = True


@attrs.frozen(kw_only=True, eq=False)
class StagePlan:
    """Stages of one micro-batch and how two of them interleave.

    The executor runs ``offset`` stages of micro-batch 0 alone, alternates, then runs ``offset`` stages of micro-batch 1 alone. With one
    micro-batch the stages simply run in order.
    """

    stages: tuple[tuple[Op, ...], ...]
    offset: int = 0
    side_stream_ops: frozenset[str] = frozenset()
    """Names of ops that run on a side stream where the device has streams."""
    compute_sm_fraction: float = 1.0


class Strategy(Protocol):
    """Orders the declared ops of a model."""

    @property
    def capabilities(self) -> StrategyCapabilities: ...

    def plan(self, ops: Sequence[Op], mode: ForwardMode) -> StagePlan:
        """Pure: the same ops and mode give the same plan on every rank."""
        ...
