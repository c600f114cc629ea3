"""The executor: order, write-once state, proof of plans, micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import attrs
import pytest
from crossdock.errors import OpStateError
from crossdock.executor import Executor, check_plan, run_op, stage_order
from crossdock.observe.timeline import PassMarks
from crossdock.types.model import ForwardContext, Model, Op, OpKind
from crossdock.types.step import ForwardMode
from crossdock.types.strategy import StagePlan, Strategy, StrategyCapabilities

CARRIED = frozenset({"x"})


def op(name: str, layer: int, fn: Callable[..., Any], **keys: tuple[str, ...]) -> Op:
    return Op(name=name, kind=OpKind.DENSE, layer=layer, fn=fn, **keys)


def layer_ops(layer: int) -> list[Op]:
    return [
        op("split", layer, lambda ctx, x: (x + 1, x * 10), reads=("x",), writes=("a", "b")),
        op("use", layer, lambda ctx, b: b + 5, keeps=("b",), writes=("c",)),
        op("join", layer, lambda ctx, a, b, c: a + b + c, reads=("a", "b", "c"), writes=("x",)),
    ]


EMBED = op("embed", -1, lambda ctx: ctx, writes=("x",))
HEAD = op("head", 2, lambda ctx, x: -x, reads=("x",), writes=("logits",))
OPS = (EMBED, *layer_ops(0), *layer_ops(1), HEAD)


def expected(x: int) -> int:
    for _ in range(2):
        x = (x + 1) + x * 10 + (x * 10 + 5)
    return -x


@attrs.frozen
class ToyStep:
    forward_mode: ForwardMode = ForwardMode.DECODE


@attrs.frozen
class ToyBatch:
    step: ToyStep = attrs.Factory(ToyStep)


class ToyContext(int):
    """A context whose embedding is a number."""

    batch = ToyBatch()


@attrs.frozen
class ToyInfo:
    num_layers: int = 2


class ToyModel:
    info = ToyInfo()
    carried = CARRIED

    def embed_ops(self) -> Sequence[Op]:
        return (EMBED,)

    def layer_ops(self, layer: int) -> Sequence[Op]:
        return OPS[1 + 3 * layer : 4 + 3 * layer]

    def head_ops(self) -> Sequence[Op]:
        return (HEAD,)


@attrs.define
class CutAt:
    """A strategy that cuts the ops into stages of a size."""

    size: int
    offset: int = 0
    planned: list[ForwardMode] = attrs.field(factory=list)
    capabilities: StrategyCapabilities = attrs.Factory(StrategyCapabilities)

    def plan(self, ops: Sequence[Op], mode: ForwardMode) -> StagePlan:
        self.planned.append(mode)
        stages = tuple(tuple(ops[i : i + self.size]) for i in range(0, len(ops), self.size))
        return StagePlan(stages=stages, offset=self.offset)


def executor(strategy: CutAt) -> Executor:
    return Executor(cast("Model", ToyModel()), cast("Strategy", strategy))


def contexts(*values: int) -> list[ForwardContext]:
    return [cast("ForwardContext", ToyContext(value)) for value in values]


@pytest.mark.parametrize(("size", "offset"), [(8, 0), (1, 0), (1, 3), (3, 1), (2, 2)])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_any_cut_and_offset_give_the_same_results(size: int, offset: int, micro_batches: int) -> None:
    values = [3, 5, 7][:micro_batches]
    found = executor(CutAt(size, offset)).run(contexts(*values))
    assert list(found) == [expected(value) for value in values]


def test_a_plan_is_made_once_a_mode() -> None:
    strategy = CutAt(8)
    running = executor(strategy)
    for _ in range(3):
        running.run(contexts(1))
    running.plan(ForwardMode.PREFILL)
    assert strategy.planned == [ForwardMode.DECODE, ForwardMode.PREFILL]


def test_a_whole_step_of_a_strategy_with_two_micro_batches_runs_in_declared_order() -> None:
    """As under ``sequential``: not to overlap has no cost of its own."""
    seen: list[str] = []

    class Marks:
        def begin(self) -> None:
            pass

        def op_ended(self, micro_batch: int, op: Op) -> None:
            seen.append(op.name)

    strategy = CutAt(2, offset=1, capabilities=StrategyCapabilities(micro_batches=2))
    running = executor(strategy)
    assert running.run(contexts(3), cast("PassMarks", Marks())) == (expected(3),)
    assert seen == [one.name for one in OPS]
    assert strategy.planned == []
    assert running.run(contexts(3, 5)) == (expected(3), expected(5))
    assert strategy.planned == [ForwardMode.DECODE]


def test_the_second_micro_batch_trails_by_the_offset() -> None:
    assert list(stage_order(3, 1, 2)) == [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2)]
    assert list(stage_order(2, 0, 2)) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert list(stage_order(2, 1, 1)) == [(0, 0), (0, 1), (0, 2)][:2]


def plan_of(ops: Sequence[Op], offset: int = 0) -> StagePlan:
    return StagePlan(stages=(tuple(ops),), offset=offset)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        (OPS[:-1], "must hold each of the 8 declared ops once; it holds 7"),
        ((*OPS[:-1], OPS[1]), "must hold each of the 8 declared ops once"),
        ((OPS[0], OPS[2], OPS[1], *OPS[3:]), r"'use' of layer 0 reads \{b\}"),
        (
            (OPS[0], *OPS[4:7], *OPS[1:4], OPS[7]),
            "'split' of layer 0 is planned after 'join' of layer 1|layers run in order",
        ),
    ],
)
def test_a_plan_that_breaks_the_order_is_refused(ops: Sequence[Op], message: str) -> None:
    with pytest.raises(OpStateError, match=message):
        check_plan(plan_of(ops), OPS, CARRIED)


def test_an_offset_beyond_the_stages_is_refused() -> None:
    with pytest.raises(OpStateError, match="stage offset 1 is not below the number of stages, 1"):
        check_plan(plan_of(OPS, offset=1), OPS, CARRIED)


def test_writing_a_live_key_is_refused() -> None:
    twice = (EMBED, op("again", 0, lambda ctx: 1, writes=("x",)), HEAD)
    with pytest.raises(OpStateError, match=r"'again' of layer 0 writes \{x\}, which is still alive"):
        check_plan(plan_of(twice), twice, CARRIED)


def test_a_layer_that_leaves_another_key_is_refused() -> None:
    leak = (
        EMBED,
        op("leak", 0, lambda ctx: 1, writes=("y",)),
        op("head", 1, lambda ctx, *v: 0, reads=("x", "y"), writes=("logits",)),
    )
    with pytest.raises(OpStateError, match=r"after op 'leak' of layer 0 \{x, y\} are left.*must leave \{x\}"):
        check_plan(plan_of(leak), leak, CARRIED)


def test_a_head_that_leaves_more_than_logits_is_refused() -> None:
    left = (EMBED, op("head", 0, lambda ctx, x: 0, keeps=("x",), writes=("logits",)))
    with pytest.raises(OpStateError, match=r"after the head \{logits, x\} are left"):
        check_plan(plan_of(left), left, CARRIED)


def test_an_op_that_returns_another_number_of_values_fails() -> None:
    wrong = op("wrong", 0, lambda ctx: (1, 2, 3), writes=("a", "b"))
    with pytest.raises(ValueError, match="zip"):
        run_op(wrong, 0, contexts(0)[0], {})


def test_a_consumed_value_is_forgotten_at_once() -> None:
    state: dict[str, Any] = {}
    for each in OPS[:2]:
        run_op(each, 0, contexts(2)[0], state)
    assert set(state) == {"a", "b"}
