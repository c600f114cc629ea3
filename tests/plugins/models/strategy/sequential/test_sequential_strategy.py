"""The strategy that overlaps nothing."""

from __future__ import annotations

import pytest
from crossdock.errors import ConfigValueError
from crossdock.strategy import make_strategy
from crossdock.types.model import Op, OpKind
from crossdock.types.step import ForwardMode


def test_every_op_is_in_one_stage_in_declared_order() -> None:
    ops = [Op(name=str(i), kind=OpKind.DENSE, layer=i, fn=print) for i in range(5)]
    strategy = make_strategy("sequential", {})
    for mode in (ForwardMode.PREFILL, ForwardMode.DECODE, ForwardMode.MIXED, ForwardMode.IDLE):
        plan = strategy.plan(ops, mode)
        assert plan.stages == (tuple(ops),)
        assert plan.offset == 0
    assert strategy.capabilities.micro_batches == 1


def test_it_has_no_options() -> None:
    with pytest.raises(ConfigValueError, match="unknown key 'offset'"):
        make_strategy("sequential", {"offset": 2})
