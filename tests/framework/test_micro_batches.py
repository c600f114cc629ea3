"""Contexts of a step: one, or two that each have their own rows, slot, attention plan and dispatch counts."""

from __future__ import annotations

from typing import cast

import attrs
import pytest
import torch
from crossdock.errors import BatchSplitError
from crossdock.groups import resolve_sizes
from crossdock.micro_batches import ContextMaker, micro_batches, sm_budget
from crossdock.types.attention import Attention, AttnMetadata
from crossdock.types.batch import ForwardBatch
from crossdock.types.layout import ATTN_ROWS
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan
from crossdock.types.strategy import OverlapLimits, StagePlan

SIZES = resolve_sizes(ranks=2, attn_dp_size=2)
PLAN = StepPlan(
    step=5,
    eplb_pass=5,
    live_tokens=(6, 4),
    padded_tokens=(6, 6),
    padding_mode=PaddingMode.MAX_LEN,
    forward_mode=ForwardMode.PREFILL,
    dispatch_mode=DispatchMode.NORMAL,
    overlap=True,
    overlap_reason="",
    overlap_rows=(3, 2),
)
STAGES = StagePlan(stages=(), spares_communication_sms=True)


class Planning:
    """An attention backend that only says which batch it was asked for."""

    def plan(self, batch: ForwardBatch, buffers: object = None) -> AttnMetadata:
        return AttnMetadata(batch=batch, data=batch.query_lens)


def batch(query_lens: tuple[int, ...], plan: StepPlan = PLAN) -> ForwardBatch:
    rows = torch.arange(plan.padded_tokens[0])
    return ForwardBatch(
        input_ids=rows,
        positions=rows.clone(),
        kv_slots=rows.clone(),
        page_table=torch.zeros(len(query_lens), 1, dtype=torch.int32),
        seq_lens=query_lens,
        query_lens=query_lens,
        logit_rows=torch.arange(sum(query_lens)),
        forward_mode=ForwardMode.PREFILL,
        step=plan,
        attn_dp_rank=0,
        num_live_tokens=sum(query_lens),
    )


def maker() -> ContextMaker:
    return ContextMaker(attention=cast("Attention", Planning()), sizes=SIZES, dispatch_rows=ATTN_ROWS)


def test_a_step_that_does_not_overlap_has_one_context_over_the_whole_batch() -> None:
    plan = attrs.evolve(PLAN, overlap=False, overlap_rows=())
    whole = batch((3, 3), plan)
    (context,) = maker().contexts(whole, STAGES)
    assert context.batch is whole
    assert context.slot == 0
    assert context.dispatch_step.source_counts == (6, 6)


def test_both_parts_have_their_own_slot_attention_plan_and_counts_of_every_rank() -> None:
    first, second = maker().contexts(batch((3, 3)), STAGES)
    assert (first.slot, second.slot) == (0, 1)
    assert (first.attn_metadata.data, second.attn_metadata.data) == ((3,), (3,))
    assert (first.batch.input_ids.tolist(), second.batch.input_ids.tolist()) == ([0, 1, 2], [3, 4, 5])
    assert (first.dispatch_step.source_counts, second.dispatch_step.source_counts) == ((3, 3), (3, 3))
    assert (first.batch.step.live_tokens, second.batch.step.live_tokens) == ((3, 2), (3, 2))
    assert first.batch.step.padding_mode is PaddingMode.MAX_LEN


def test_a_batch_that_cannot_be_cut_in_a_step_that_overlaps_is_a_mistake_of_the_vote() -> None:
    plan = attrs.evolve(PLAN, live_tokens=(1, 4), overlap_rows=(0, 2))
    with pytest.raises(BatchSplitError, match=r"step 5 overlaps, but rows of lengths \[1\] cannot be cut"):
        micro_batches(batch((1,), plan), SIZES, OverlapLimits())


def test_there_are_no_processors_to_share_on_a_cpu() -> None:
    assert sm_budget(STAGES, 20, torch.device("cpu")) is None


@attrs.frozen
class Properties:
    multi_processor_count: int = 132


@pytest.mark.parametrize(
    ("stages", "communication", "expected"),
    [
        (StagePlan(stages=(), spares_communication_sms=True), 20, 112),
        (StagePlan(stages=(), spares_communication_sms=False), 20, None),
        (StagePlan(stages=(), spares_communication_sms=True), 0, None),
        (StagePlan(stages=(), compute_sm_fraction=0.5), 20, 66),
        (StagePlan(stages=(), spares_communication_sms=True), 200, 1),
    ],
)
def test_experts_leave_the_processors_alone_that_the_dispatcher_uses(
    monkeypatch: pytest.MonkeyPatch, stages: StagePlan, communication: int, expected: int | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    assert sm_budget(stages, communication, torch.device("cuda", 0)) == expected
