"""The one executor: runs the declared ops of a model, for one micro-batch or several, in the order of a strategy's stages.

The state of a micro-batch is write-once. Because ops declare what they read, keep and write, the whole data flow is proved when a
plan is made, and running a step checks nothing any more.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from crossdock.errors import OpStateError
from crossdock.side_stream import CudaStreams, SidePass, StreamPair, side_inputs
from crossdock.types.strategy import StagePlan

if TYPE_CHECKING:
    import torch

    from crossdock.observe.timeline import PassMarks
    from crossdock.types.model import ForwardContext, Model, Op
    from crossdock.types.step import ForwardMode
    from crossdock.types.strategy import Strategy

LOGITS = "logits"
"""The one key that is left after the head."""
EMBED_LAYER = -1
"""``Op.layer`` of the ops before the first layer; those after the last one have ``num_layers``."""


def forward_ops(model: Model) -> tuple[Op, ...]:
    """Every op of one forward pass in sequential order: embedding, layers, head."""
    layers = [op for layer in range(model.info.num_layers) for op in model.layer_ops(layer)]
    return (*model.embed_ops(), *layers, *model.head_ops())


class Executor:
    """Runs forward passes of one model under one strategy. Plans are made once a forward mode and kept.

    A step that a strategy with two micro-batches leaves whole runs in declared order, as under ``sequential``: not to overlap costs nothing.

    Args:
        model: its declared operations.
        strategy: orders them.
        streams: for plans with operations beside the others; by default those of the device, where it has streams.
    """

    def __init__(self, model: Model, strategy: Strategy, streams: StreamPair | None = None) -> None:
        self._strategy = strategy
        self._streams = streams
        self._ops = forward_ops(model)
        self._carried = model.carried
        self._plans: dict[ForwardMode, StagePlan] = {}

    @functools.cached_property
    def _declared(self) -> StagePlan:
        plan = StagePlan(stages=(self._ops,))
        check_plan(plan, self._ops, self._carried)
        return plan

    def plan(self, mode: ForwardMode) -> StagePlan:
        """The proved plan of a mode, for as many micro-batches as the strategy has.

        Raises:
            OpStateError: the strategy lost, repeated or invented an op, or its order breaks the data flow.
        """
        if mode not in self._plans:
            plan = self._strategy.plan(self._ops, mode)
            check_plan(plan, self._ops, self._carried)
            self._plans[mode] = plan
        return self._plans[mode]

    def run(self, contexts: Sequence[ForwardContext], marks: PassMarks | None = None) -> tuple[torch.Tensor, ...]:
        """One forward pass of one or more micro-batches.

        Args:
            contexts: one a micro-batch. The global forward mode of the first one's step chooses the plan, so that every rank takes the same.
            marks: gets a mark after each operation; None where the pass is not timed.

        Returns:
            Logits [R, vocab] float32 of each micro-batch.
        """
        is_planned = len(contexts) > 1 or self._strategy.capabilities.micro_batches == 1
        plan = self.plan(contexts[0].batch.step.forward_mode) if is_planned else self._declared
        states: list[dict[str, Any]] = [{} for _ in contexts]
        side = self._side_pass(plan, contexts[0], marks)
        if marks is not None:
            marks.begin()
        for micro_batch, stage in stage_order(len(plan.stages), plan.offset, len(contexts)):
            for op in plan.stages[stage]:
                run_op(op, micro_batch, contexts[micro_batch], states[micro_batch], side)
                if marks is not None:
                    marks.op_ended(micro_batch, op)
        if side is not None:
            side.finish()
        return tuple(state[LOGITS] for state in states)

    def _side_pass(self, plan: StagePlan, context: ForwardContext, marks: PassMarks | None) -> SidePass | None:
        """None where every operation runs in place."""
        if not plan.beside:
            return None
        device = context.batch.input_ids.device
        if self._streams is None and device.type == "cuda":
            self._streams = CudaStreams(device)
        if self._streams is None:
            return None
        return SidePass(streams=self._streams, kinds=plan.beside, inputs=side_inputs(plan), marks=marks)


def stage_order(num_stages: int, offset: int, micro_batches: int) -> Iterator[tuple[int, int]]:
    """(micro-batch, stage) in running order: each micro-batch trails the one before it by ``offset`` stages.

    With two of them: ``offset`` stages of the first alone, then in turn, then ``offset`` stages of the second alone.
    """
    for tick in range(num_stages + offset * (micro_batches - 1)):
        for micro_batch in range(micro_batches):
            stage = tick - offset * micro_batch
            if 0 <= stage < num_stages:
                yield micro_batch, stage


def run_op(
    op: Op, micro_batch: int, context: ForwardContext, state: dict[str, Any], side: SidePass | None = None
) -> None:
    """Runs an op on one micro-batch's state, in the stream that ``side`` chooses."""
    values = [state.pop(key) for key in op.reads]
    values += [state[key] for key in op.keeps]
    result = op.fn(context, *values) if side is None else side.run(micro_batch, op, context, values)
    if len(op.writes) == 1:
        state[op.writes[0]] = result
    elif op.writes:
        state.update(zip(op.writes, result, strict=True))


def check_plan(plan: StagePlan, ops: Sequence[Op], carried: frozenset[str]) -> None:
    """Proves that a plan runs each op once, layer by layer, on a write-once state.

    Raises:
        OpStateError: names the op and the keys.
    """
    planned = [op for stage in plan.stages for op in stage]
    if len(planned) != len(ops) or {id(op) for op in planned} != {id(op) for op in ops}:
        raise OpStateError(f"a stage plan must hold each of the {len(ops)} declared ops once; it holds {len(planned)}")
    if plan.offset < 0 or plan.offset >= len(plan.stages):
        raise OpStateError(f"stage offset {plan.offset} is not below the number of stages, {len(plan.stages)}")
    last = planned[-1].layer
    live: set[str] = set()
    for i, op in enumerate(planned):
        live = _step(op, live)
        if op.layer == last:
            continue
        if planned[i + 1].layer < op.layer:
            raise OpStateError(f"{_label(planned[i + 1])} is planned after {_label(op)}; layers run in order")
        if planned[i + 1].layer > op.layer and frozenset(live) != carried:
            raise OpStateError(
                f"after {_label(op)} {_keys(live)} are left; a layer of this model must leave {_keys(carried)}"
            )
    if live != {LOGITS}:
        raise OpStateError(f"after the head {_keys(live)} are left; it must leave {_keys({LOGITS})}")


def _step(op: Op, live: set[str]) -> set[str]:
    """Keys that are alive after an op."""
    absent = (set(op.reads) | set(op.keeps)) - live
    if absent:
        raise OpStateError(
            f"{_label(op)} reads {_keys(absent)}, which no op before it has written or another has consumed"
        )
    rest = live - set(op.reads)
    if rest & set(op.writes):
        raise OpStateError(
            f"{_label(op)} writes {_keys(rest & set(op.writes))}, which is still alive; state is write-once"
        )
    return rest | set(op.writes)


def _label(op: Op) -> str:
    return f"op {op.name!r} of layer {op.layer}"


def _keys(keys: set[str] | frozenset[str]) -> str:
    return "{" + ", ".join(sorted(keys)) + "}"
