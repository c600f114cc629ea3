"""The sequential strategy is the declared order itself."""

from __future__ import annotations

import pytest
from crossdock.strategy import make_strategy
from crossdock.types.model import Op, OpKind
from crossdock.types.step import ForwardMode


def op(name: str) -> Op:
    return Op(name=name, kind=OpKind.DENSE, layer=0, fn=lambda context: None)


@pytest.mark.parametrize("mode", list(ForwardMode))
def test_every_op_is_in_declared_order_in_one_stage(mode: ForwardMode) -> None:
    ops = [op(name) for name in ("c", "a", "b")]
    plan = make_strategy("sequential", {}).plan(ops, mode)
    assert [[planned.name for planned in stage] for stage in plan.stages] == [["c", "a", "b"]]
    assert plan.offset == 0


def test_it_needs_one_slot_of_the_dispatcher_and_runs_anywhere() -> None:
    capabilities = make_strategy("sequential", {}).capabilities
    assert capabilities.micro_batches == 1
    assert capabilities.devices == {"cpu", "cuda"}
