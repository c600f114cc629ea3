"""``single_batch`` moves the shared experts behind a begin, and nothing else."""

from __future__ import annotations

import pytest
from crossdock.errors import ConfigValueError
from crossdock.strategy import make_strategy
from crossdock.types.model import Op, OpKind
from crossdock.types.step import ForwardMode

KINDS = (
    OpKind.SHARED,
    OpKind.DISPATCH_BEGIN,
    OpKind.DISPATCH_END,
    OpKind.EXPERTS,
    OpKind.COMBINE_BEGIN,
    OpKind.COMBINE_END,
)


def order(options: dict[str, object]) -> list[list[str]]:
    ops = [Op(name=kind.value, kind=kind, layer=0, fn=lambda context: None) for kind in KINDS]
    plan = make_strategy("single_batch", options).plan(ops, ForwardMode.DECODE)
    return [[op.name for op in stage] for stage in plan.stages]


def test_the_shared_experts_hide_the_dispatch() -> None:
    assert order({}) == [
        ["dispatch_begin", "shared", "dispatch_end", "experts", "combine_begin", "combine_end"],
    ]


def test_the_shared_experts_hide_the_combine() -> None:
    assert order({"hides": "combine"}) == [
        ["dispatch_begin", "dispatch_end", "experts", "combine_begin", "shared", "combine_end"],
    ]


def test_one_micro_batch_is_enough() -> None:
    assert make_strategy("single_batch", {}).capabilities.micro_batches == 1


def test_another_place_is_refused() -> None:
    with pytest.raises(ConfigValueError, match="hides"):
        make_strategy("single_batch", {"hides": "nothing"})
