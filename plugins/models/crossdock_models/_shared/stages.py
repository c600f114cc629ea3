"""Stage plans by the kinds of declared operations: any model that declares them can be overlapped (the facts, section 7.5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from crossdock.types.model import Op, OpKind
from crossdock.types.step import ForwardMode
from crossdock.types.strategy import StagePlan

DECODE_OFFSET = 2
"""Stages that the second micro-batch trails by in a decode step: one attends while the other's rows travel."""
_DECODE_MODES = (ForwardMode.DECODE, ForwardMode.VERIFY, ForwardMode.IDLE)


def two_batch_stages(ops: Sequence[Op], mode: ForwardMode, *, lends_sms: bool = True) -> StagePlan:
    """The stages of a step of this global mode. A step that mixes prompt and decode rows runs as prefill: same operations, same collectives."""
    return _decode_stages(ops) if mode in _DECODE_MODES else _prefill_stages(ops, lends_sms=lends_sms)


def _prefill_stages(ops: Sequence[Op], *, lends_sms: bool) -> StagePlan:
    """Cut after each begin; the shared experts run while results travel back. Dense layers have no cut: they lengthen a stage."""
    ordered = with_shared_after(ops, OpKind.COMBINE_BEGIN)
    begins = (OpKind.DISPATCH_BEGIN, OpKind.COMBINE_BEGIN)
    stages = cut_between(ordered, lambda op, following: op.kind in begins)
    return StagePlan(stages=stages, spares_communication_sms=lends_sms)


def _decode_stages(ops: Sequence[Op]) -> StagePlan:
    """Five cuts a layer with routed experts; the shared experts run while rows travel there."""
    routed = {op.layer for op in ops if op.kind is OpKind.ROUTE}
    shared = {op.layer for op in ops if op.kind is OpKind.SHARED}

    def ends_stage(op: Op, following: Op) -> bool:
        if op.layer not in routed:
            return False
        if (
            op.kind in (OpKind.ATTN_PREPARE, OpKind.ROUTE, OpKind.COMBINE_BEGIN)
            or following.kind is OpKind.DISPATCH_END
        ):
            return True
        # With shared experts a layer's tail and the next one's head are one stage, without them the layer ends a stage.
        return op.kind is OpKind.COMBINE_END if op.layer in shared else following.layer != op.layer

    stages = cut_between(with_shared_after(ops, OpKind.DISPATCH_BEGIN), ends_stage)
    return StagePlan(stages=stages, offset=DECODE_OFFSET if len(stages) > DECODE_OFFSET else 0)


def with_shared_after(ops: Sequence[Op], kind: OpKind) -> list[Op]:
    """``ops`` with the shared experts of each layer right behind its operation of ``kind``; elsewhere they stay."""
    anchored = {op.layer for op in ops if op.kind is kind}
    ordered: list[Op] = []
    for op in ops:
        if op.kind is OpKind.SHARED and op.layer in anchored:
            continue
        ordered.append(op)
        if op.kind is kind:
            ordered += [other for other in ops if other.layer == op.layer and other.kind is OpKind.SHARED]
    return ordered


def cut_between(ops: Sequence[Op], ends_stage: Callable[[Op, Op], bool]) -> tuple[tuple[Op, ...], ...]:
    """Stages of ``ops``: a cut wherever ``ends_stage(op, following)`` says so."""
    stages: list[list[Op]] = [[]]
    for op, following in zip(ops, [*ops[1:], None], strict=True):
        stages[-1].append(op)
        if following is not None and ends_stage(op, following):
            stages.append([])
    return tuple(tuple(stage) for stage in stages)
