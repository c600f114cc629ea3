"""What must hold for a strategy: each op once, the data flow kept, the same plan on every rank, and the bits of ``sequential``."""

from __future__ import annotations

import tempfile
from pathlib import Path

from crossdock.errors import OpStateError
from crossdock.executor import check_plan
from crossdock.groups import resolve_sizes
from crossdock.strategy import make_strategy
from crossdock.testing.conformance import PluginCase, check_of
from crossdock.testing.model_driver import Work
from crossdock.testing.model_parts import DriverChoice
from crossdock.testing.overlap_equality import compare_with_sequential
from crossdock.testing.random_checkpoint import write_random_checkpoint
from crossdock.testing.tiny_models import FAMILY_FIELDS, FRAME
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


FAMILY = "deepseek_v3"
"""A dense layer, then routed and shared experts."""
STEPS: tuple[tuple[Work, ...], ...] = (
    ({0: [5, 6, 7], 1: [8, 9, 10, 11, 12]}, {2: [13, 14, 15, 16, 17, 18, 19]}),
    ({0: [20], 1: [21]}, {2: [22], 3: [23]}),
    ({0: [24], 1: [25]}, {}),
    ({0: [26], 4: [27, 28, 29]}, {5: [30, 31], 2: [32]}),
    ({0: [33], 1: [34]}, {6: [35, 36, 37, 38]}),
    ({7: [39]}, {}),
)
"""Prefill, decode, decode beside an idle replica, mixed on both, mixed over replicas, one token."""


def check_logits_have_the_bits_of_sequential(case: PluginCase) -> None:
    config = {"model_type": FAMILY, "dtype": "float32", **FRAME, **FAMILY_FIELDS[FAMILY]}
    sizes = resolve_sizes(ranks=2, attn_dp_size=2)
    with tempfile.TemporaryDirectory(prefix="crossdock-strategy-") as folder:
        write_random_checkpoint(Path(folder), config)
        choice = DriverChoice(
            folder=folder,
            dispatcher="alltoallv",
            strategy=case.name,
            strategy_options=dict(case.options),
            always_overlaps=True,
        )
        findings = case.pool_of(2).run(compare_with_sequential, choice, sizes, STEPS, timeout_s=90)
    for rank, finding in enumerate(findings):
        assert not finding.differences, f"rank {rank}: logits differ from those of sequential: {finding.differences}"
        assert finding.reasons == findings[0].reasons, "ranks decided differently which steps overlap"
    if make_strategy(case.name, case.options).capabilities.micro_batches > 1:
        assert "" in findings[0].reasons, f"no step overlapped: {findings[0].reasons}"


CHECKS = (
    check_of(check_each_op_runs_once_in_an_order_that_keeps_the_data_flow),
    check_of(check_the_plan_is_the_same_each_time),
    check_of(check_micro_batches_can_interleave),
    check_of(check_logits_have_the_bits_of_sequential),
)
