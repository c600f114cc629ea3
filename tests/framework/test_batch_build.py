"""Batches: live rows first, padding into scratch, every slot where its page says."""

from __future__ import annotations

import pytest
import torch
from crossdock.batch_build import build_batch, upload_batch
from crossdock.errors import MisuseError
from crossdock.step_work import PENDING, SequenceRows, StepWork
from crossdock.types.batch import ForwardBatch
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan


def plan(live: tuple[int, ...], padded: tuple[int, ...]) -> StepPlan:
    return StepPlan(
        step=1,
        eplb_pass=1,
        live_tokens=live,
        padded_tokens=padded,
        padding_mode=PaddingMode.MAX_LEN,
        forward_mode=ForwardMode.MIXED,
        dispatch_mode=DispatchMode.NORMAL,
        overlap=False,
        overlap_reason="",
    )


def batch(work: StepWork, padded: int, sampled: tuple[int, ...] = ()) -> ForwardBatch:
    step = plan((work.num_tokens,), (padded,))
    host = build_batch(work, step, attn_dp_rank=0, page_tokens=4)
    return upload_batch(host, step, torch.tensor(sampled, dtype=torch.int64))


def test_a_mixed_batch_lies_in_order_with_slots_of_its_pages() -> None:
    work = StepWork(
        sequences=(
            SequenceRows(tokens=(7,), start=5, pages=(3, 9), num_logit_rows=1, is_decode=True),
            SequenceRows(tokens=(1, 2, 3, 4, 5), start=2, pages=(8, 2), num_logit_rows=1),
            SequenceRows(tokens=(6, 6), start=0, pages=(5,)),
        )
    )
    built = batch(work, 10)
    assert built.input_ids.tolist() == [7, 1, 2, 3, 4, 5, 6, 6, 0, 0]
    assert built.positions.tolist() == [5, 2, 3, 4, 5, 6, 0, 1, 0, 0]
    assert built.kv_slots.tolist() == [37, 34, 35, 8, 9, 10, 20, 21, 0, 0]
    assert built.page_table.tolist() == [[3, 9], [8, 2], [5, 0]]
    assert (built.seq_lens, built.query_lens) == ((6, 7, 2), (1, 5, 2))
    assert built.logit_rows.tolist() == [0, 5]
    assert (built.num_live_tokens, built.num_rows, built.num_sequences) == (8, 10, 3)
    assert built.forward_mode is ForwardMode.MIXED
    assert built.input_ids.dtype == built.kv_slots.dtype == torch.int64
    assert built.page_table.dtype == torch.int32


@pytest.mark.parametrize("logit_rows", [1, 2, 3, 4])
def test_the_page_table_is_aligned_whatever_else_is_uploaded(logit_rows: int) -> None:
    rows = SequenceRows(tokens=(1, 2, 3, 4, 5), start=4, pages=(1, 2, 3), num_logit_rows=logit_rows)
    built = batch(StepWork(sequences=(rows,)), 5)
    assert built.page_table.data_ptr() % 16 == 0
    assert built.page_table.tolist() == [[1, 2, 3]]
    assert built.logit_rows.tolist() == list(range(5 - logit_rows, 5))


def test_prompt_rows_that_are_scored_are_all_logit_rows() -> None:
    work = StepWork(sequences=(SequenceRows(tokens=(1, 2, 3), start=4, pages=(1, 2), num_logit_rows=3),))
    assert batch(work, 3).logit_rows.tolist() == [0, 1, 2]


@pytest.mark.parametrize("padded", [0, 1, 4])
def test_an_idle_batch_has_no_sequence_and_only_padding(padded: int) -> None:
    built = batch(StepWork(), padded)
    assert built.num_rows == padded
    assert built.kv_slots.tolist() == [0] * padded
    assert built.num_sequences == built.num_live_tokens == 0
    assert built.logit_rows.shape == (0,)
    assert built.page_table.shape[0] == 0
    assert built.forward_mode is ForwardMode.IDLE


def test_pending_tokens_are_taken_from_the_ids_of_the_step_before() -> None:
    work = StepWork(
        sequences=(
            SequenceRows(tokens=(PENDING,), start=5, pages=(3, 9), source=2, samples=True),
            SequenceRows(tokens=(4, 5), start=0, pages=(8,)),
            SequenceRows(tokens=(PENDING,), start=1, pages=(7,), source=0, samples=True),
        )
    )
    built = batch(work, 5, sampled=(70, 71, 72))
    assert built.input_ids.tolist() == [72, 4, 5, 70, 0]
    assert work.num_samples == 2


def test_a_plan_for_other_rows_is_misuse() -> None:
    work = StepWork(sequences=(SequenceRows(tokens=(1,), start=0, pages=(1,)),))
    with pytest.raises(MisuseError, match="has 1 rows, but the plan was made for 2"):
        build_batch(work, plan((2,), (2,)), attn_dp_rank=0, page_tokens=4)


def test_a_sequence_longer_than_its_pages_is_misuse() -> None:
    work = StepWork(sequences=(SequenceRows(tokens=(1,), start=4, pages=(1,)),))
    with pytest.raises(MisuseError, match="5 tokens do not fit into 1 pages of 4"):
        batch(work, 1)
