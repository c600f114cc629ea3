"""What became of each rebalance: for the log, the receipt, metrics, observers and ``/placement/history``."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import attrs
import structlog

from crossdock.observe.receipt import RebalanceEntry, ReceiptCounters
from crossdock.types.moves import LayerMoves
from crossdock.types.observer import Observer
from crossdock.types.rebalance import RebalanceFacts

_LOG = structlog.get_logger("crossdock.eplb")
KEPT_ENTRIES = 200
"""Rebalances that history and receipt remember."""


@attrs.define(kw_only=True, eq=False)
class RebalanceProgress:
    """One rebalance, from the decision on."""

    step: int
    reason: str
    facts: RebalanceFacts | None = None
    """None for one that was asked for over HTTP."""
    gain_s: float | None = None
    price_s: float | None = None
    balancedness_before: float | None = None
    balancedness_after: float | None = None
    """Predicted."""
    num_layers: int = 0
    layers_done: int = 0
    moved_slots: int = 0
    moved_bytes: int = 0
    """Over links, or from the checkpoint's files; all ranks together."""
    largest_pause_s: float = 0.0
    """Longest stay of a step thread between two steps because of it."""

    def predicted(self, *, gain_s: float, price_s: float, before: float, after: float) -> None:
        self.gain_s, self.price_s = gain_s, price_s
        self.balancedness_before, self.balancedness_after = before, after

    def layer_done(self, moves: LayerMoves, slot_bytes: int) -> None:
        self.layers_done += 1
        self.moved_slots += len(moves.moves)
        self.moved_bytes += slot_bytes * sum(move.kind in ("same_node", "cross_node") for move in moves.moves)

    def paused(self, seconds: float) -> None:
        self.largest_pause_s = max(self.largest_pause_s, seconds)

    def describe(self) -> str:
        return f"{self.layers_done} of {self.num_layers} layers have switched"


@attrs.define(kw_only=True, eq=False)
class RebalanceLog:
    """Of one rank."""

    rank: int
    counters: ReceiptCounters
    observers: Sequence[Observer]
    gauges: MutableMapping[str, float]
    """Numbers for ``/metrics``."""
    entries: deque[Mapping[str, Any]] = attrs.field(factory=lambda: deque[Mapping[str, Any]](maxlen=KEPT_ENTRIES))

    def add(self, progress: RebalanceProgress, outcome: str) -> None:
        """``applied``, ``rolled_back`` or ``refused``."""
        entry = RebalanceEntry(
            step=progress.step,
            outcome=outcome,
            reason=progress.reason,
            moved_slots=progress.moved_slots,
            moved_bytes=progress.moved_bytes,
            predicted_gain_s=progress.gain_s,
            price_s=progress.price_s,
            stalled_s=progress.largest_pause_s,
        )
        self.counters.add_rebalance(entry)
        del self.counters.rebalances[:-KEPT_ENTRIES]
        event = {
            **attrs.asdict(entry),
            "layers_switched": progress.layers_done,
            "layers_planned": progress.num_layers,
            "balancedness_before": progress.balancedness_before,
            "balancedness_predicted": progress.balancedness_after,
        }
        self.entries.append(event)
        name = f"eplb_rebalances_{outcome}"
        self.gauges[name] = self.gauges.get(name, 0.0) + 1
        self.gauges["eplb_moved_bytes"] = self.gauges.get("eplb_moved_bytes", 0.0) + progress.moved_bytes
        largest_s = max(self.gauges.get("eplb_largest_pause_seconds", 0.0), progress.largest_pause_s)
        self.gauges["eplb_largest_pause_seconds"] = largest_s
        if progress.gain_s is not None and progress.price_s is not None:
            self.gauges["eplb_predicted_gain_seconds"] = progress.gain_s
            self.gauges["eplb_price_seconds"] = progress.price_s
        for observer in self.observers:
            observer.on_rebalance(event)
        if self.rank == 0:
            level = _LOG.warning if outcome == "rolled_back" else _LOG.info
            level("rebalance", **event)
