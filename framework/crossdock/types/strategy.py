"""Operation strategies: how the declared ops of micro-batches are ordered (DESIGN section 9; the facts, section 7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs

from crossdock.types.model import Op, OpKind
from crossdock.types.step import ForwardMode


@attrs.frozen(kw_only=True)
class OverlapLimits:
    """When a step is worth two micro-batches, and where it is cut: plain data, so that every rank decides the same."""

    min_prefill_rows: int = 512
    """A step with prompt rows is cut when its largest replica has so many rows."""
    min_decode_rows: int = 32
    """The same for a step of decode rows alone."""
    balance_threshold: float = 0.48
    """Smallest share of rows that a half may have before a sequence is cut instead; at most 0.5, and 0 never cuts one."""
    mixes_modes: bool = False
    """Replicas of different modes overlap in the same step, each cut by the rule of its own mode."""
    is_gated: bool = True
    """False: steps overlap whatever sizes, dispatcher and measured times say."""


@attrs.frozen(kw_only=True)
class StrategyCapabilities:
    """What a strategy needs from the dispatcher and the device."""

    micro_batches: int = 1
    """Dispatcher slots needed at once."""
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    graph_capture: bool = True
    overlap: OverlapLimits = attrs.field(factory=OverlapLimits)
    """Means something with two micro-batches only."""


@attrs.frozen(kw_only=True, eq=False)
class StagePlan:
    """Stages of one micro-batch and how two of them interleave.

    The executor runs ``offset`` stages of micro-batch 0 alone, alternates, then runs ``offset`` stages of micro-batch 1 alone. With one
    micro-batch the stages simply run in order.
    """

    stages: tuple[tuple[Op, ...], ...]
    offset: int = 0
    compute_sm_fraction: float = 1.0
    spares_communication_sms: bool = False
    """Experts leave the SMs alone that the dispatcher says its communication uses."""
    beside: frozenset[OpKind] = frozenset()
    """Kinds of operations that run in a stream of their own: from the begin of the transfer before them until an operation takes what they
    wrote. In place on devices without streams."""


class Strategy(Protocol):
    """Orders the declared ops of a model."""

    @property
    def capabilities(self) -> StrategyCapabilities: ...

    def plan(self, ops: Sequence[Op], mode: ForwardMode) -> StagePlan:
        """Pure: the same ops and mode give the same plan on every rank."""
        ...
