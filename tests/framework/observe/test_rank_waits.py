"""Waiting for a slower rank, told apart from the transfers themselves."""

from __future__ import annotations

import attrs
import pytest
from crossdock.observe.rank_waits import rank_waits
from crossdock.types.observer import Span


def span(name: str, category: str, begin: float, duration: float, step: int = 4) -> Span:
    return Span(step=step, micro_batch=0, layer=1, name=name, category=category, begin_us=begin, duration_us=duration)


def one_pass(computing_us: float, ends_us: float, start_us: float = 0.0) -> tuple[Span, ...]:
    """Computes, sends for 10 us, waits until a moment, and computes on."""
    sent = start_us + computing_us
    return (
        span("attn", "attention", start_us, computing_us),
        span("dispatch_begin", "dispatch", sent, 10),
        span("dispatch_end", "wait", sent + 10, start_us + ends_us - sent - 10),
        span("experts", "experts", start_us + ends_us, 50),
    )


def test_a_rank_waits_until_the_slowest_one_begins_its_transfer_and_the_rest_is_the_transfer() -> None:
    fast, slow, slower = one_pass(100, 190), one_pass(140, 190), one_pass(160, 190)
    assert rank_waits({0: fast, 1: slow, 2: slower}) == {0: 60.0, 1: 20.0, 2: 0.0}
    assert rank_waits({0: fast, 1: slow}) == {0: 40.0, 1: 0.0}


def test_a_transfer_that_ended_in_its_begin_is_looked_at_there() -> None:
    """Where a step does not overlap, the begin itself may wait for the others."""
    fast = (
        span("attn", "attention", 0, 100),
        span("dispatch_begin", "dispatch", 100, 90),
        span("end", "wait", 190, 0),
    )
    assert rank_waits({0: fast, 1: one_pass(160, 190)}) == {0: 60.0, 1: 0.0}


def test_a_hidden_transfer_waits_for_nobody() -> None:
    """The other rank had begun long before this one looked."""
    hidden = (
        span("dispatch_begin", "dispatch", 0, 10),
        span("experts", "experts", 10, 180),
        span("end", "wait", 190, 5),
    )
    assert rank_waits({0: hidden, 1: one_pass(100, 195)}) == {0: 10.0, 1: 0.0}


def test_directions_layers_micro_batches_and_steps_are_transfers_of_their_own() -> None:
    slow = one_pass(160, 190)
    for changes in ({"step": 5}, {"layer": 2}, {"micro_batch": 1}):
        other = tuple(attrs.evolve(one, **changes) for one in one_pass(100, 190))
        assert rank_waits({0: other, 1: slow}) == {0: 0.0, 1: 0.0}, changes


@pytest.mark.parametrize("spans", [{}, {0: one_pass(100, 190)}, {0: one_pass(1, 90), 1: one_pass(1, 90, 1e9)}])
def test_one_rank_and_clocks_of_two_machines_say_nothing(spans: dict[int, tuple[Span, ...]]) -> None:
    assert rank_waits(spans) is None
