"""Observers are told what happened; they return nothing and must not depend on order (DESIGN section 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import attrs


@attrs.frozen(kw_only=True)
class Span:
    """One operation of one micro-batch on one rank."""

    step: int
    micro_batch: int
    layer: int
    """-1 before the first layer."""
    name: str
    category: str
    """``attention``, ``boundary``, ``route``, ``dispatch``, ``experts``, ``combine``, ``wait``, ``dense`` or ``other``."""
    begin_us: float
    """On a clock that the ranks of a machine share."""
    duration_us: float
    is_beside: bool = False
    """It ran in a stream of its own beside the others."""


@attrs.frozen(kw_only=True)
class StepEvent:
    """One finished step of one replica."""

    rank: int
    attn_dp_rank: int
    step: int
    forward_mode: str
    padding_mode: str
    dispatch_mode: str
    graph: bool
    overlap: bool
    local_tokens: int
    all_tokens: tuple[int, ...]
    attention_pairs: tuple[int, ...]
    sync_wait_s: float
    duration_s: float
    is_health_check: bool
    spans: tuple[Span, ...] = ()
    """Of the steps whose operations were timed; empty for the others."""


class Observer(Protocol):
    """Told between steps, on the host, with plain values."""

    def on_step(self, event: StepEvent) -> None: ...

    def on_load(self, forward_mode: str, balancedness_per_layer: tuple[float, ...]) -> None: ...

    def on_rebalance(self, event: Mapping[str, Any]) -> None: ...

    def on_fault(self, rank: int, message: str) -> None: ...


@attrs.frozen(kw_only=True)
class ObserverSpec:
    """Where an observer works."""

    rank: int
    attn_dp_rank: int
    num_ranks: int
    output_folder: str | None = None
    """Folder for files that the observer writes; None when none was configured."""
