"""What must hold for a strategy: each op once, the data flow kept, the same plan on every rank."""

from __future__ import annotations

from crossdock.errors import OpStateError
from crossdock.executor import check_plan
from crossdock.strategy import make_strategy
from crossdock.testing.conformance import PluginCase, check_of
from crossdock.types.model import Op, OpKind
from crossdock.types.step import ForwardMode

_MODES = (ForwardMode.PREFILL, ForwardMode.DECODE, ForwardMode.MIXED, ForwardMode.IDLE)
_CARRIED = frozenset({"stream"})


def _pass(*values: object) -> object:
    return values


def _op(
    name: str, kind: OpKind, layer: int, reads: tuple[str, ...], writes: tuple[str, ...], keeps: tuple[str, ...] = ()
) -> Op:
    return Op(name=name, kind=kind, layer=layer, fn=_pass, reads=reads, writes=writes, keeps=keeps)


def _moe_layer(layer: int) -> list[Op]:
    """Attention, then routed and shared experts, as the first-party models declare them."""
    rows = (
        ("attn_boundary", OpKind.BOUNDARY, ("stream",), ("attn_in", "residual"), ()),
        ("attn_prepare", OpKind.ATTN_PREPARE, ("attn_in",), ("qkv",), ()),
        ("attn_core", OpKind.ATTN_CORE, ("qkv",), ("attn_out",), ()),
        ("moe_boundary", OpKind.BOUNDARY, ("attn_out", "residual"), ("moe_in", "moe_residual"), ()),
        ("route", OpKind.ROUTE, (), ("routed",), ("moe_in",)),
        ("dispatch_begin", OpKind.DISPATCH_BEGIN, ("routed",), ("sent",), ("moe_in",)),
        ("shared", OpKind.SHARED, ("moe_in",), ("shared_out",), ()),
        ("dispatch_end", OpKind.DISPATCH_END, ("sent",), ("received",), ()),
        ("experts", OpKind.EXPERTS, ("received",), ("expert_out",), ()),
        ("combine_begin", OpKind.COMBINE_BEGIN, ("expert_out",), ("returning",), ()),
        ("combine_end", OpKind.COMBINE_END, ("returning",), ("routed_out",), ()),
        ("output", OpKind.OUTPUT, ("routed_out", "shared_out", "moe_residual"), ("stream",), ()),
    )
    return [_op(f"layer{layer}.{name}", kind, layer, reads, writes, keeps) for name, kind, reads, writes, keeps in rows]


def _dense_layer(layer: int) -> list[Op]:
    rows = (
        ("attn_boundary", OpKind.BOUNDARY, ("stream",), ("attn_in", "residual")),
        ("attn_prepare", OpKind.ATTN_PREPARE, ("attn_in",), ("qkv",)),
        ("attn_core", OpKind.ATTN_CORE, ("qkv",), ("attn_out",)),
        ("dense_boundary", OpKind.BOUNDARY, ("attn_out", "residual"), ("dense_in", "dense_residual")),
        ("dense", OpKind.DENSE, ("dense_in",), ("dense_out",)),
        ("output", OpKind.OUTPUT, ("dense_out", "dense_residual"), ("stream",)),
    )
    return [_op(f"layer{layer}.{name}", kind, layer, reads, writes) for name, kind, reads, writes in rows]


def _ops() -> list[Op]:
    embed = [_op("embed", OpKind.EMBED, -1, (), ("stream",))]
    head = [_op("head", OpKind.OUTPUT, 3, ("stream",), ("logits",))]
    return [*embed, *_dense_layer(0), *_moe_layer(1), *_moe_layer(2), *head]


def check_each_op_runs_once_in_an_order_that_keeps_the_data_flow(case: PluginCase) -> None:
    strategy, ops = make_strategy(case.name, case.options), _ops()
    for mode in _MODES:
        try:
            check_plan(strategy.plan(ops, mode), ops, _CARRIED)
        except OpStateError as error:
            raise AssertionError(f"{mode.name.lower()}: {error}") from error


def check_the_plan_is_the_same_each_time(case: PluginCase) -> None:
    ops = _ops()
    for mode in _MODES:
        first, second = (make_strategy(case.name, case.options).plan(ops, mode) for _ in range(2))
        assert [[op.name for op in stage] for stage in first.stages] == [
            [op.name for op in stage] for stage in second.stages
        ]
        assert first.offset == second.offset


def check_micro_batches_can_interleave(case: PluginCase) -> None:
    strategy = make_strategy(case.name, case.options)
    assert strategy.capabilities.micro_batches >= 1
    for mode in _MODES:
        plan = strategy.plan(_ops(), mode)
        assert 0 <= plan.offset <= len(plan.stages), f"offset {plan.offset} is outside the {len(plan.stages)} stages"
        assert 0.0 < plan.compute_sm_fraction <= 1.0


CHECKS = (
    check_of(check_each_op_runs_once_in_an_order_that_keeps_the_data_flow),
    check_of(check_the_plan_is_the_same_each_time),
    check_of(check_micro_batches_can_interleave),
)
