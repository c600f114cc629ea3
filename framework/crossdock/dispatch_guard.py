"""The core's guard around a dispatcher: call order, slots, shapes, dtypes and capacity (DESIGN section 7).

Libraries behind dispatchers clear the other call's buffers or drop rows when they are called out of order or with too many rows;
the guard turns both into an error before the library sees the call.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import attrs
import torch

from crossdock.errors import DispatchMisuse

if TYPE_CHECKING:
    from crossdock.rows import Rows
    from crossdock.types.dispatch import (
        Dispatcher,
        DispatcherCapabilities,
        DispatcherSpec,
        DispatchStep,
        Pending,
        Received,
    )


class Stage(enum.Enum):
    """What a slot did last."""

    FREE = "free"
    DISPATCH_BEGUN = "after dispatch_begin"
    DISPATCH_ENDED = "after dispatch_end"
    COMBINE_BEGUN = "after combine_begin"


@attrs.define(eq=False)
class _Flight:
    """One slot: its stage, and what must be handed to the next call."""

    stage: Stage = Stage.FREE
    num_rows: int = 0
    pending: Pending | None = None
    received: Received | None = None


class GuardedDispatcher:
    """A dispatcher that raises ``DispatchMisuse`` instead of losing rows or hanging; otherwise it only passes calls on.

    ``check_ids`` also looks at the values of expert ids, which waits for the device: for tests and for debugging.
    """

    def __init__(self, inner: Dispatcher, spec: DispatcherSpec, *, check_ids: bool = False) -> None:
        self._inner = inner
        self._spec = spec
        self._check_ids = check_ids
        self._flights = [_Flight() for _ in range(spec.max_in_flight)]
        capacity = inner.capabilities.capacity_rows_per_rank
        self._row_limit = spec.max_rows_per_rank if capacity is None else min(spec.max_rows_per_rank, capacity)

    @property
    def capabilities(self) -> DispatcherCapabilities:
        return self._inner.capabilities

    def stage(self, slot: int) -> Stage:
        """What the slot did last."""
        return self._flight(slot, "stage").stage

    def reset(self) -> None:
        """Forgets all flights, for a step that is repeated after a fault."""
        self._flights = [_Flight() for _ in self._flights]

    def dispatch_begin(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        step: DispatchStep,
        slot: int,
    ) -> Pending:
        flight = self._enter("dispatch_begin", slot, Stage.FREE)
        self._check_inputs(hidden_states, topk_ids, topk_weights, step)
        pending = self._inner.dispatch_begin(hidden_states, topk_ids, topk_weights, step, slot)
        flight.stage, flight.num_rows, flight.pending = Stage.DISPATCH_BEGUN, hidden_states.shape[0], pending
        return pending

    def dispatch_end(self, pending: Pending) -> Received:
        flight = self._enter("dispatch_end", pending.slot, Stage.DISPATCH_BEGUN)
        self._check_same("dispatch_end", "Pending", pending, flight.pending)
        received = self._inner.dispatch_end(pending)
        flight.stage, flight.pending, flight.received = Stage.DISPATCH_ENDED, None, received
        return received

    def combine_begin(self, expert_out: torch.Tensor, received: Received) -> Pending:
        flight = self._enter("combine_begin", received.slot, Stage.DISPATCH_ENDED)
        self._check_same("combine_begin", "Received", received, flight.received)
        if expert_out.shape[:-1] != received.rows.shape[:-1] or expert_out.shape[-1] != self._spec.hidden_size:
            raise DispatchMisuse(
                f"combine_begin: expert output {list(expert_out.shape)} does not match received rows "
                f"{list(received.rows.shape)}; the leading dims must be equal and the last one {self._spec.hidden_size}"
            )
        if expert_out.dtype not in (torch.float32, torch.bfloat16):
            raise DispatchMisuse(f"combine_begin: expert output is {expert_out.dtype}; return float32 or bfloat16")
        pending = self._inner.combine_begin(expert_out, received)
        flight.stage, flight.pending, flight.received = Stage.COMBINE_BEGUN, pending, None
        return pending

    def combine_end(self, pending: Pending) -> Rows:
        flight = self._enter("combine_end", pending.slot, Stage.COMBINE_BEGUN)
        self._check_same("combine_end", "Pending", pending, flight.pending)
        rows = self._inner.combine_end(pending)
        expected = [flight.num_rows, self._spec.hidden_size]
        if list(rows.partial.shape) != expected:
            raise DispatchMisuse(
                f"combine_end: the dispatcher returned {list(rows.partial.shape)}, dispatched were {expected}"
            )
        self._flights[pending.slot] = _Flight()
        return rows

    def _flight(self, slot: int, call: str) -> _Flight:
        if not 0 <= slot < len(self._flights):
            raise DispatchMisuse(
                f"{call}: slot {slot} does not exist, this dispatcher was made for {len(self._flights)} in flight; "
                f"finish a slot first, or make it with a larger max_in_flight (the plugin allows "
                f"{self._inner.capabilities.max_in_flight})"
            )
        return self._flights[slot]

    def _enter(self, call: str, slot: int, expected: Stage) -> _Flight:
        flight = self._flight(slot, call)
        if flight.stage is not expected:
            raise DispatchMisuse(
                f"{call}: slot {slot} is '{flight.stage.value}' and must be '{expected.value}'; the order of a slot is "
                "dispatch_begin, dispatch_end, combine_begin, combine_end"
            )
        return flight

    @staticmethod
    def _check_same(call: str, kind: str, given: object, issued: object) -> None:
        if given is not issued:
            raise DispatchMisuse(
                f"{call}: this {kind} is not the one that the slot's last call returned; pass that one on"
            )

    def _check_inputs(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, step: DispatchStep
    ) -> None:
        spec = self._spec
        num_rows = hidden_states.shape[0]
        problems = [
            f"{name} is {found}, expected {wanted}"
            for name, found, wanted in (
                ("hidden_states", list(hidden_states.shape), [num_rows, spec.hidden_size]),
                ("topk_ids", list(topk_ids.shape), [num_rows, spec.top_k]),
                ("topk_weights", list(topk_weights.shape), [num_rows, spec.top_k]),
                ("hidden_states dtype", hidden_states.dtype, spec.dtype),
                ("topk_ids dtype", topk_ids.dtype, torch.int64),
                ("topk_weights dtype", topk_weights.dtype, torch.float32),
            )
            if found != wanted
        ]
        if problems:
            raise DispatchMisuse("dispatch_begin: " + "; ".join(problems))
        if num_rows > self._row_limit:
            raise DispatchMisuse(
                f"dispatch_begin: rank {spec.place.rank} brings {num_rows} rows and at most {self._row_limit} fit; rows never "
                f"vanish: lower scheduler.max_step_tokens, or make the dispatcher for {num_rows} rows a rank"
            )
        if step.source_counts is not None and step.source_counts[spec.place.rank] != num_rows:
            raise DispatchMisuse(
                f"dispatch_begin: the step says that rank {spec.place.rank} brings {step.source_counts[spec.place.rank]} "
                f"rows, it brings {num_rows}; build source_counts from the padded counts of the step"
            )
        if self._check_ids and num_rows:
            low, high = int(topk_ids.min()), int(topk_ids.max())
            if low < -1 or high >= spec.num_physical_experts:
                raise DispatchMisuse(
                    f"dispatch_begin: expert ids from {low} to {high}; physical ids go from 0 to "
                    f"{spec.num_physical_experts - 1}, -1 is no expert"
                )
