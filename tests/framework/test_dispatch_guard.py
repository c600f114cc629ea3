"""The guard stops every call that would lose rows or hang, before the dispatcher sees it."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from crossdock.comm import local_comms
from crossdock.dispatch_guard import GuardedDispatcher, Stage
from crossdock.errors import DispatchMisuse
from crossdock.groups import rank_place, resolve_sizes
from crossdock.rows import Rows
from crossdock.types.dispatch import (
    DispatcherCapabilities,
    DispatcherSpec,
    DispatchStep,
    Pending,
    Received,
    ReceiveLayout,
)
from crossdock.types.layout import COMPLETE, FULL_ROWS

SIZES = resolve_sizes(ranks=1)
HIDDEN, TOP_K, EXPERTS = 8, 2, 4


class RecordingDispatcher:
    """Passes rows through and writes down what it was asked."""

    def __init__(self, spec: DispatcherSpec, **capabilities: Any) -> None:
        self.calls: list[str] = []
        self.spec = spec
        self.capabilities = DispatcherCapabilities(
            layouts=frozenset({ReceiveLayout.TOKEN_ROWS}),
            input_rows=FULL_ROWS,
            output_rows=FULL_ROWS,
            output_owed=COMPLETE,
            needs_full_ep=False,
            rank_invariant_picks_needed=False,
            **capabilities,
        )

    def dispatch_begin(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        step: DispatchStep,
        slot: int,
    ) -> Pending:
        self.calls.append("dispatch_begin")
        return Pending(slot=slot, payload=hidden_states)

    def dispatch_end(self, pending: Pending) -> Received:
        self.calls.append("dispatch_end")
        return Received(layout=ReceiveLayout.TOKEN_ROWS, rows=pending.payload, slot=pending.slot)

    def combine_begin(self, expert_out: torch.Tensor, received: Received) -> Pending:
        self.calls.append("combine_begin")
        return Pending(slot=received.slot, payload=expert_out)

    def combine_end(self, pending: Pending) -> Rows:
        self.calls.append("combine_end")
        return Rows(tensor=pending.payload, layout=FULL_ROWS, owed=COMPLETE, comms=self.spec.comms)


def make(max_rows: int = 8, max_in_flight: int = 2, check_ids: bool = False, **capabilities: Any) -> GuardedDispatcher:
    spec = DispatcherSpec(
        sizes=SIZES,
        place=rank_place(SIZES, 0),
        comms=local_comms(),
        hidden_size=HIDDEN,
        top_k=TOP_K,
        num_physical_experts=EXPERTS,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_rows_per_rank=max_rows,
        max_in_flight=max_in_flight,
    )
    return GuardedDispatcher(RecordingDispatcher(spec, **capabilities), spec, check_ids=check_ids)


def begin(guard: GuardedDispatcher, rows: int = 3, slot: int = 0, step: DispatchStep | None = None) -> Pending:
    return guard.dispatch_begin(
        torch.zeros(rows, HIDDEN),
        torch.zeros(rows, TOP_K, dtype=torch.int64),
        torch.ones(rows, TOP_K),
        step or DispatchStep(),
        slot,
    )


def test_a_legal_round_leaves_the_slot_free() -> None:
    guard = make()
    for rows in (3, 0, 8):
        received = guard.dispatch_end(begin(guard, rows))
        assert guard.stage(0) is Stage.DISPATCH_ENDED
        result = guard.combine_end(guard.combine_begin(received.rows, received))
        assert result.num_rows == rows
        assert guard.stage(0) is Stage.FREE


def test_two_slots_are_independent() -> None:
    guard = make()
    first, second = begin(guard, 3, slot=0), begin(guard, 2, slot=1)
    late = guard.dispatch_end(second)
    early = guard.dispatch_end(first)
    assert guard.combine_end(guard.combine_begin(early.rows, early)).num_rows == 3
    assert guard.combine_end(guard.combine_begin(late.rows, late)).num_rows == 2


def test_a_third_dispatch_begin_before_any_end_names_the_stages() -> None:
    guard = make()
    begin(guard, slot=0)
    begin(guard, slot=1)
    with pytest.raises(DispatchMisuse, match="slot 2 does not exist, this dispatcher was made for 2 in flight"):
        begin(guard, slot=2)
    with pytest.raises(DispatchMisuse, match="slot 0 is 'after dispatch_begin' and must be 'free'"):
        begin(guard, slot=0)


def test_combine_begin_before_dispatch_end_names_the_stages() -> None:
    guard = make()
    pending = begin(guard)
    fake = Received(layout=ReceiveLayout.TOKEN_ROWS, rows=pending.payload)
    with pytest.raises(DispatchMisuse, match="slot 0 is 'after dispatch_begin' and must be 'after dispatch_end'"):
        guard.combine_begin(pending.payload, fake)


def test_a_pending_of_another_call_is_refused() -> None:
    guard = make()
    pending = begin(guard)
    with pytest.raises(DispatchMisuse, match="this Pending is not the one"):
        guard.dispatch_end(attrs.evolve(pending))
    received = guard.dispatch_end(pending)
    with pytest.raises(DispatchMisuse, match="this Received is not the one"):
        guard.combine_begin(received.rows, attrs.evolve(received))
    returning = guard.combine_begin(received.rows, received)
    with pytest.raises(DispatchMisuse, match="must be 'after dispatch_begin'"):
        guard.dispatch_end(returning)


def test_the_dispatcher_never_sees_a_misuse() -> None:
    guard = make()
    begin(guard)
    with pytest.raises(DispatchMisuse):
        begin(guard)
    assert guard._inner.calls == ["dispatch_begin"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("max_rows", "capacity"), [(8, None), (100, 8), (8, 100)])
def test_exactly_the_limit_works_and_one_row_more_is_refused_with_the_limit(
    max_rows: int, capacity: int | None
) -> None:
    guard = make(max_rows, capacity_rows_per_rank=capacity)
    received = guard.dispatch_end(begin(guard, 8))
    guard.combine_end(guard.combine_begin(received.rows, received))
    with pytest.raises(DispatchMisuse, match="brings 9 rows and at most 8 fit"):
        begin(guard, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_states": torch.zeros(3, HIDDEN + 1)}, r"hidden_states is \[3, 9\], expected \[3, 8\]"),
        ({"hidden_states": torch.zeros(3, HIDDEN, dtype=torch.bfloat16)}, "hidden_states dtype is torch.bfloat16"),
        ({"topk_ids": torch.zeros(3, TOP_K, dtype=torch.int32)}, "topk_ids dtype is torch.int32"),
        ({"topk_ids": torch.zeros(2, TOP_K, dtype=torch.int64)}, r"topk_ids is \[2, 2\], expected \[3, 2\]"),
        ({"topk_weights": torch.zeros(3, TOP_K, dtype=torch.float64)}, "topk_weights dtype is torch.float64"),
    ],
)
def test_wrong_shapes_and_dtypes_are_named(changes: dict[str, torch.Tensor], message: str) -> None:
    arguments = {
        "hidden_states": torch.zeros(3, HIDDEN),
        "topk_ids": torch.zeros(3, TOP_K, dtype=torch.int64),
        "topk_weights": torch.zeros(3, TOP_K),
    }
    with pytest.raises(DispatchMisuse, match=message):
        make().dispatch_begin(**(arguments | changes), step=DispatchStep(), slot=0)


def test_an_expert_output_that_does_not_match_the_received_rows_is_refused() -> None:
    guard = make()
    received = guard.dispatch_end(begin(guard))
    with pytest.raises(DispatchMisuse, match=r"expert output \[2, 8\] does not match"):
        guard.combine_begin(torch.zeros(2, HIDDEN), received)
    with pytest.raises(DispatchMisuse, match="float16"):
        guard.combine_begin(torch.zeros(3, HIDDEN, dtype=torch.float16), received)


def test_source_counts_that_contradict_the_rows_are_refused() -> None:
    with pytest.raises(DispatchMisuse, match="the step says that rank 0 brings 4 rows, it brings 3"):
        begin(make(), 3, step=DispatchStep(source_counts=(4,)))


@pytest.mark.parametrize("bad_id", [-2, EXPERTS])
def test_ids_out_of_range_are_found_when_asked_to_look(bad_id: int) -> None:
    ids = torch.tensor([[0, -1], [bad_id, 1]])
    with pytest.raises(DispatchMisuse, match="physical ids go from 0 to 3"):
        make(check_ids=True).dispatch_begin(torch.zeros(2, HIDDEN), ids, torch.ones(2, TOP_K), DispatchStep(), 0)


def test_reset_forgets_a_step_that_failed_half_way() -> None:
    guard = make()
    guard.dispatch_end(begin(guard))
    guard.reset()
    assert guard.stage(0) is Stage.FREE
    begin(guard)
