"""A dispatcher on a slow link: rows pass one after the other, each in a given time, while this rank may compute."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import attrs

from crossdock.types.dispatch import Pending

if TYPE_CHECKING:
    import torch

    from crossdock.rows import Rows
    from crossdock.types.dispatch import Dispatcher, DispatcherCapabilities, DispatchStep, Received


@attrs.frozen(eq=False)
class _Held:
    """What the other dispatcher returned, and the moment before which it is not handed on."""

    pending: Pending
    ready_s: float


@attrs.define(eq=False)
class DelayedDispatcher:
    """Wraps another dispatcher; an end that comes early sleeps, as a rank does that waits for a network card."""

    inner: Dispatcher
    row_s: float
    """Of one row, in either direction."""
    _free_s: float = attrs.field(default=0.0, init=False)
    """When the link has passed everything that was sent so far."""

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
        pending = self.inner.dispatch_begin(hidden_states, topk_ids, topk_weights, step, slot)
        return self._hold(pending, hidden_states.shape[0])

    def dispatch_end(self, pending: Pending) -> Received:
        return self.inner.dispatch_end(self._awaited(pending.payload))

    def combine_begin(self, expert_out: torch.Tensor, received: Received) -> Pending:
        return self._hold(self.inner.combine_begin(expert_out, received), expert_out.shape[0])

    def combine_end(self, pending: Pending) -> Rows:
        return self.inner.combine_end(self._awaited(pending.payload))

    def _hold(self, pending: Pending, rows: int) -> Pending:
        self._free_s = max(self._free_s, time.monotonic()) + rows * self.row_s
        return Pending(slot=pending.slot, payload=_Held(pending, self._free_s))

    @staticmethod
    def _awaited(held: Any) -> Pending:
        assert isinstance(held, _Held)
        left_s = held.ready_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        return held.pending
