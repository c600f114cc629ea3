"""Stages follow from the kinds of operations: the reference's lists for prefill and decode, with and without shared experts."""

from __future__ import annotations

import pytest
from crossdock.executor import check_plan
from crossdock.types.model import Op, OpKind
from crossdock.types.step import ForwardMode
from crossdock_models._shared.stages import two_batch_stages

NAMES = {
    "enter_attention": OpKind.BOUNDARY,
    "attn_prepare": OpKind.ATTN_PREPARE,
    "attn_core": OpKind.ATTN_CORE,
    "enter_ffn": OpKind.BOUNDARY,
    "route": OpKind.ROUTE,
    "dispatch_begin": OpKind.DISPATCH_BEGIN,
    "shared": OpKind.SHARED,
    "dispatch_end": OpKind.DISPATCH_END,
    "experts": OpKind.EXPERTS,
    "combine_begin": OpKind.COMBINE_BEGIN,
    "combine_end": OpKind.COMBINE_END,
    "leave_ffn": OpKind.OUTPUT,
}
DENSE = {name: NAMES[name] for name in ("enter_attention", "attn_prepare", "attn_core", "enter_ffn")} | {
    "dense": OpKind.DENSE,
    "leave_ffn": OpKind.OUTPUT,
}


def op(name: str, kind: OpKind, layer: int) -> Op:
    return Op(name=name, kind=kind, layer=layer, fn=lambda context: None)


def routed(layer: int, *, shared: bool) -> list[Op]:
    return [op(name, kind, layer) for name, kind in NAMES.items() if shared or name != "shared"]


def dense(layer: int) -> list[Op]:
    return [op(name, kind, layer) for name, kind in DENSE.items()]


def text(ops: list[Op], mode: ForwardMode) -> list[str]:
    return [" ".join(one.name for one in stage) for stage in two_batch_stages(ops, mode).stages]


def test_prefill_of_a_layer_with_shared_experts() -> None:
    assert text(routed(0, shared=True), ForwardMode.PREFILL) == [
        "enter_attention attn_prepare attn_core enter_ffn route dispatch_begin",
        "dispatch_end experts combine_begin",
        "shared combine_end leave_ffn",
    ]


def test_decode_of_a_layer_with_shared_experts() -> None:
    assert text(routed(0, shared=True), ForwardMode.DECODE) == [
        "enter_attention attn_prepare",
        "attn_core enter_ffn route",
        "dispatch_begin shared",
        "dispatch_end experts combine_begin",
        "combine_end",
        "leave_ffn",
    ]


def test_decode_without_shared_experts_ends_a_stage_with_each_layer() -> None:
    ops = routed(0, shared=False) + routed(1, shared=False)
    stages = text(ops, ForwardMode.DECODE)
    assert len(stages) == 5 * 2
    assert (
        stages[:5]
        == stages[5:]
        == [
            "enter_attention attn_prepare",
            "attn_core enter_ffn route",
            "dispatch_begin",
            "dispatch_end experts combine_begin",
            "combine_end leave_ffn",
        ]
    )


@pytest.mark.parametrize(("mode", "stages"), [(ForwardMode.PREFILL, 2 * 3 + 1), (ForwardMode.DECODE, 5 * 3 + 1)])
def test_the_tail_of_a_layer_and_the_head_of_the_next_are_one_stage(mode: ForwardMode, stages: int) -> None:
    ops = [one for layer in range(3) for one in routed(layer, shared=True)]
    assert len(two_batch_stages(ops, mode).stages) == stages


@pytest.mark.parametrize("mode", [ForwardMode.PREFILL, ForwardMode.DECODE])
def test_dense_layers_lengthen_a_stage_instead_of_ending_the_overlap(mode: ForwardMode) -> None:
    alone = two_batch_stages(routed(1, shared=True), mode)
    plan = two_batch_stages([*dense(0), *routed(1, shared=True), *dense(2)], mode)
    assert len(plan.stages) == len(alone.stages)
    assert [one.layer for one in plan.stages[0]][:6] == [0] * 6
    assert {one.layer for one in plan.stages[-1]} == {1, 2}


def test_offsets_and_the_share_of_the_processors() -> None:
    ops = routed(0, shared=True)
    assert not two_batch_stages(ops, ForwardMode.PREFILL, lends_sms=False).spares_communication_sms
    prefill, decode = (two_batch_stages(ops, mode) for mode in (ForwardMode.PREFILL, ForwardMode.DECODE))
    assert (prefill.offset, prefill.spares_communication_sms) == (0, True)
    assert (decode.offset, decode.spares_communication_sms) == (2, False)


def test_a_model_without_experts_is_one_stage() -> None:
    for mode in (ForwardMode.PREFILL, ForwardMode.DECODE, ForwardMode.MIXED):
        plan = two_batch_stages(dense(0) + dense(1), mode)
        assert (len(plan.stages), plan.offset) == (1, 0)


def test_a_plan_holds_each_operation_once() -> None:
    head = Op(name="head", kind=OpKind.OUTPUT, layer=2, fn=lambda context: None, writes=("logits",))
    ops = [*routed(0, shared=True), *dense(1), head]
    for mode in ForwardMode:
        check_plan(two_batch_stages(ops, mode), ops, frozenset())
