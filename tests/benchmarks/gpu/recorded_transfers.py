"""A dispatcher whose transfers can be left out: it remembers what arrived in one pass, and hands it over again in others.

What is left of such a pass is its computing, on the same numbers of rows, without a gap in which the device could rest: stage times at the
power that overlapped passes have.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

import attrs
import torch
from crossdock.rows import Rows
from crossdock.types.dispatch import Dispatcher, DispatcherCapabilities, DispatchStep, Pending, Received


@attrs.define(eq=False)
class Recording:
    """What arrived at this rank in a pass, by slot, in order."""

    way: Literal["pass on", "record", "replay"] = "pass on"
    received: defaultdict[int, list[Received]] = attrs.field(factory=lambda: defaultdict(list))
    returned: defaultdict[int, list[Rows]] = attrs.field(factory=lambda: defaultdict(list))
    _place: defaultdict[int, int] = attrs.field(factory=lambda: defaultdict(int))

    def begin(self, way: Literal["pass on", "record", "replay"]) -> None:
        """Of the next pass."""
        self.way = way
        self._place.clear()
        if way == "record":
            self.received.clear()
            self.returned.clear()

    def next_received(self, slot: int) -> Received:
        return self.received[slot][self._place[slot]]

    def next_returned(self, slot: int) -> Rows:
        self._place[slot] += 1
        return self.returned[slot][self._place[slot] - 1]


@attrs.frozen(eq=False)
class RecordedDispatcher:
    """Passes calls on, unless the recording is replayed."""

    inner: Dispatcher
    recording: Recording

    @property
    def capabilities(self) -> DispatcherCapabilities:
        return self.inner.capabilities

    def dispatch_begin(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        step: DispatchStep,
        slot: int,
    ) -> Pending:
        if self.recording.way == "replay":
            return Pending(slot=slot, payload=None)
        return self.inner.dispatch_begin(hidden_states, topk_ids, topk_weights, step, slot)

    def dispatch_end(self, pending: Pending) -> Received:
        if self.recording.way == "replay":
            return self.recording.next_received(pending.slot)
        received = self.inner.dispatch_end(pending)
        if self.recording.way == "record":
            self.recording.received[pending.slot].append(_kept(received))
        return received

    def combine_begin(self, expert_out: torch.Tensor, received: Received) -> Pending:
        if self.recording.way == "replay":
            return Pending(slot=received.slot, payload=None)
        return self.inner.combine_begin(expert_out, received)

    def combine_end(self, pending: Pending) -> Rows:
        if self.recording.way == "replay":
            return self.recording.next_returned(pending.slot)
        rows = self.inner.combine_end(pending)
        if self.recording.way == "record":
            self.recording.returned[pending.slot].append(rows)
        return rows


def _kept(received: Received) -> Received:
    """With choices of its own: a dispatcher's buffers hold those of its last transfer. What stands in the rows does not matter."""
    ids, weights = received.local_topk_ids, received.row_weights
    return attrs.evolve(
        received,
        local_topk_ids=None if ids is None else ids.clone(),
        row_weights=None if weights is None else weights.clone(),
    )
