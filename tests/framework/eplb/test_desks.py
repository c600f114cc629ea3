"""Orders beside the steps: a thread and a process answer alike, failures are told, and a lost process is replaced."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from crossdock.eplb.desk_process import ProcessDesk
from crossdock.eplb.desk_thread import ThreadDesk
from crossdock.eplb.layer_plan import MoveBudget
from crossdock.eplb.orders import LayerOrder, Numbers, Pending, PlanningDesk, PlanOrder
from crossdock.eplb.prediction import Rates
from crossdock.placement import make_eplb_algo, trivial_placement
from crossdock.testing.expert_loads import LOADS
from crossdock.types.placement import ExpertLoad, Placement, Topology

PATIENCE_S = 30.0
TOPOLOGY = Topology(num_gpus=4, num_nodes=2, num_physical_experts=40)
COUNTS = LOADS["drift"]((2, 3, 32), 1)


@pytest.fixture(params=["thread", "process"])
def desk(request: pytest.FixtureRequest) -> Iterator[PlanningDesk]:
    options: dict[str, object] = {"effort": "fast"}
    made: PlanningDesk = (
        ProcessDesk("crossdock", options)
        if request.param == "process"
        else ThreadDesk(make_eplb_algo("crossdock", options))
    )
    yield made
    made.close()


def order(num_slots: int = 40) -> PlanOrder:
    current = trivial_placement(3, 32, num_slots)
    return PlanOrder(
        counts=Numbers.of(COUNTS),
        current=Numbers.of(current.physical_to_logical),
        topology=TOPOLOGY,
        slot_bytes=100,
        passes_to_next=10,
        rates=Rates(step_s=0.1, expert_share=0.5, link_bytes_per_s=1e6, copy_bytes_per_s=1e7),
    )


def done(pending: Pending[object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not pending.is_done:
        assert time.monotonic() < deadline, "no answer"
        pending.wait_briefly(0.05)


def test_a_desk_answers_as_if_asked_directly(desk: PlanningDesk) -> None:
    planned = desk.plan(order())
    done(planned)
    assert planned.error is None
    expected = order().run(make_eplb_algo("crossdock", {"effort": "fast"}))
    assert planned.result == expected
    layer = LayerOrder(
        row=1,
        old=tuple(order().current.array()[1].tolist()),
        new=tuple(expected.slots.array()[1].tolist()),
        topology=TOPOLOGY,
        budget=MoveBudget(slot_bytes=100, max_bytes=150, max_copy_bytes=300, max_replicas=9),
        ep_rank=2,
    )
    answer = desk.layer(layer)
    done(answer)
    assert answer.result == layer.run()
    assert answer.result.moves.moves


def test_what_went_wrong_is_told_and_the_next_order_is_answered(desk: PlanningDesk) -> None:
    wrong = desk.plan(order(num_slots=44))
    done(wrong)
    assert "40" in str(wrong.error)
    right = desk.plan(order())
    done(right)
    assert right.error is None


def test_a_process_that_is_gone_is_told_and_replaced() -> None:
    desk = ProcessDesk("global", {})
    try:
        desk.process.kill()
        desk.process.wait()
        lost = desk.plan(order())
        done(lost)
        assert "the process that plans has ended (code -9)" in str(lost.error)
        desk.abandon()
        again = desk.plan(order())
        done(again)
        assert again.error is None
        abandoned = desk.process
        desk.plan(order())
        desk.abandon()
        assert abandoned.returncode is not None
        assert np.array_equal(again.result.slots.array(), order().run(make_eplb_algo("global", {})).slots.array())
    finally:
        desk.close()
    assert desk.process.returncode is not None


class StuckPlanner:
    """Its first plan waits until the test lets it go."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.calls = 0

    def plan(self, load: ExpertLoad, topology: Topology, current: Placement | None) -> Placement:
        self.calls += 1
        if self.calls == 1:
            self.may_end.wait(PATIENCE_S)
        return trivial_placement(3, 32, 40)


def test_a_thread_that_is_stuck_is_left_to_itself_and_replaced() -> None:
    planner = StuckPlanner()
    desk = ThreadDesk(planner)
    try:
        stuck = desk.plan(order())
        desk.abandon()
        again = desk.plan(order())
        done(again)
        assert again.error is None
        assert not stuck.is_done
    finally:
        planner.may_end.set()
        desk.close()


def test_orders_start_no_thread_of_their_own() -> None:
    """Who starts a thread waits until it runs: milliseconds of a step where all cores are busy."""
    desk = ThreadDesk(make_eplb_algo("global", {}))
    try:
        before = threading.active_count()
        for pending in [desk.plan(order()) for _ in range(3)]:
            assert threading.active_count() == before
            done(pending)
    finally:
        desk.close()


def test_planning_needs_no_torch() -> None:
    """The process comes up in a moment and takes little memory."""
    code = "import sys, crossdock.eplb.desk_process, crossdock_eplb_algos.eplb_algo.crossdock.planner; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "False"
