"""Gain and price of a plan, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from crossdock.eplb.prediction import Rates, forecast
from crossdock.types.placement import Placement, Topology

TOPOLOGY = Topology(num_gpus=2, num_nodes=1, num_physical_experts=4)
RATES = Rates(step_s=0.1, expert_share=0.5, link_bytes_per_s=1000.0, copy_bytes_per_s=10_000.0)


def test_gain_is_step_time_saved_until_the_next_decision_and_price_is_transfer_and_stall() -> None:
    # Loads 30 + 10 against 5 + 5 become 30 + 5 against 10 + 5.
    load = np.array([[30.0, 10.0, 5.0, 5.0]])
    old = Placement.from_physical([[0, 1, 2, 3]], 4)
    new = Placement.from_physical([[0, 2, 1, 3]], 4)
    judged = forecast(old, new, load, TOPOLOGY, slot_bytes=100, passes_to_next=1000, rates=RATES)
    assert judged.gain_s == pytest.approx((1 - 35 / 40) * 0.5 * 0.1 * 1000)
    assert judged.price_s == pytest.approx(100 / 1000 + 100 / 10_000)
    assert judged.balancedness_before == pytest.approx(25 / 40)
    assert judged.balancedness_after == pytest.approx(25 / 35)
    assert (judged.moved_slots, judged.moved_bytes) == (2, 200)


def test_a_plan_that_changes_nothing_is_free_and_wins_nothing() -> None:
    load = np.array([[30.0, 10.0, 5.0, 5.0]])
    old = Placement.from_physical([[0, 1, 2, 3]], 4)
    judged = forecast(old, old, load, TOPOLOGY, slot_bytes=100, passes_to_next=10, rates=RATES)
    assert (judged.gain_s, judged.price_s, judged.moves) == (0.0, 0.0, ())


def test_without_load_nothing_can_be_won() -> None:
    old, new = (Placement.from_physical([slots], 4) for slots in ([0, 1, 2, 3], [3, 1, 2, 0]))
    judged = forecast(old, new, np.zeros((1, 4)), TOPOLOGY, slot_bytes=1, passes_to_next=10, rates=RATES)
    assert judged.gain_s == 0.0
    assert judged.balancedness_before == judged.balancedness_after == 1.0
