"""Batches split by the rules of their fields, and merged back."""

import attrs
import pytest
import torch
from crossdock.errors import BatchSplitError
from crossdock.groups import align_rows, resolve_sizes
from crossdock.split import RECOMPUTED, merge_logits, merge_rows, split_batch
from crossdock.split_point import SplitPoint, child_plans, split_point
from crossdock.types.batch import SPLIT_RULE, ForwardBatch, SplitRule, split_field
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan
from hypothesis import given, settings
from hypothesis import strategies as st

PAGE_TOKENS = 4
MAX_PAGES = 40


def batch_of(mode, query_lens, prefixes, attn_tp=1, overlap_rows=0, batch_class=ForwardBatch, **extra):
    """A batch with recognisable values: token ids and slots count up from one."""
    live = sum(query_lens)
    rows = align_rows(live, attn_tp)
    plan = StepPlan(
        step=3,
        eplb_pass=3,
        live_tokens=(live,),
        padded_tokens=(rows,),
        padding_mode=PaddingMode.SUM_LEN,
        forward_mode=mode,
        dispatch_mode=DispatchMode.NORMAL,
        overlap=True,
        overlap_reason="",
        overlap_rows=(overlap_rows,),
    )
    padding = [0] * (rows - live)
    positions = [prefix + row for prefix, rows in zip(prefixes, query_lens, strict=True) for row in range(rows)]
    ends = torch.tensor([0, *query_lens]).cumsum(0)[1:]
    return batch_class(
        input_ids=torch.tensor([*range(1, live + 1), *padding]),
        positions=torch.tensor([*positions, *padding], dtype=torch.int64),
        kv_slots=torch.tensor([*range(101, live + 101), *padding]),
        page_table=torch.arange(len(query_lens) * MAX_PAGES, dtype=torch.int32).view(len(query_lens), MAX_PAGES),
        seq_lens=tuple(prefix + rows for prefix, rows in zip(prefixes, query_lens, strict=True)),
        query_lens=tuple(query_lens),
        logit_rows=ends - 1,
        forward_mode=mode,
        step=plan,
        attn_dp_rank=0,
        num_live_tokens=live,
        **extra,
    )


def split(mode, query_lens, prefixes=None, attn_tp=1, **options):
    """The batch, its cut and its two micro-batches."""
    point = split_point(mode, query_lens)
    assert point is not None
    prefixes = prefixes or [0] * len(query_lens)
    batch = batch_of(mode, query_lens, prefixes, attn_tp, overlap_rows=point.rows, **options)
    plans = child_plans(batch.step, resolve_sizes(ranks=attn_tp))
    return batch, point, split_batch(batch, point, plans)


def test_the_golden_example_with_a_prefix_on_every_sequence():
    batch, _, (first, second) = split(ForwardMode.PREFILL, [10, 900, 20, 30], prefixes=[1, 2, 3, 4])
    assert first.query_lens == (10, 470) and second.query_lens == (430, 20, 30)
    assert first.seq_lens == (11, 472) and second.seq_lens == (902, 23, 34)
    assert int(second.positions[0]) == 2 + 470
    assert torch.equal(first.page_table, batch.page_table[:2]) and torch.equal(second.page_table, batch.page_table[1:])
    assert first.logit_rows.tolist() == [9] and second.logit_rows.tolist() == [429, 449, 479]


def test_three_decoding_sequences_padded_to_four_are_split_by_live_sequences():
    _, _, (first, second) = split(ForwardMode.DECODE, [1, 1, 1], prefixes=[5, 6, 7], attn_tp=2)
    assert first.input_ids.tolist() == [1, 0] and second.input_ids.tolist() == [2, 3]
    assert first.num_live_tokens == 1 and second.num_live_tokens == 2
    assert first.kv_slots.tolist() == [101, 0]
    assert second.seq_lens == (7, 8)


def test_an_idle_batch_has_two_idle_children():
    _, _, (first, second) = split(ForwardMode.IDLE, [])
    for child in (first, second):
        assert child.num_rows == 0 and child.num_sequences == 0
        assert child.forward_mode is ForwardMode.IDLE and child.logit_rows.shape == (0,)


@st.composite
def cases(draw):
    mode = draw(st.sampled_from([ForwardMode.PREFILL, ForwardMode.MIXED, ForwardMode.DECODE]))
    rows = st.just(1) if mode is ForwardMode.DECODE else st.integers(1, 9)
    query_lens = draw(st.lists(rows, min_size=2, max_size=7))
    prefixes = [draw(st.integers(0, 9)) for _ in query_lens]
    return mode, query_lens, prefixes, draw(st.integers(1, 4))


@settings(deadline=None)
@given(cases())
def test_merging_the_parts_gives_the_batch_back(case):
    mode, query_lens, prefixes, attn_tp = case
    batch, point, children = split(mode, query_lens, prefixes, attn_tp)
    live = [child.num_live_tokens for child in children]
    for name in ("input_ids", "positions", "kv_slots"):
        merged = merge_rows([getattr(child, name) for child in children], live)
        assert torch.equal(merged, getattr(batch, name)[: batch.num_live_tokens])
    for child in children:
        assert child.num_rows == child.step.padded_tokens[0] and child.num_rows % attn_tp == 0
        assert sum(child.query_lens) == child.num_live_tokens
        assert not child.input_ids[child.num_live_tokens :].any() and not child.kv_slots[child.num_live_tokens :].any()
    first, second = children
    shared = int(point.cuts_sequence)
    lengths = [*first.query_lens, *second.query_lens]
    if shared:
        at = point.sequences - 1
        assert first.seq_lens[-1] + second.query_lens[0] == second.seq_lens[0]
        lengths[at : at + 2] = [lengths[at] + lengths[at + 1]]
    assert tuple(lengths) == batch.query_lens
    assert (*first.seq_lens[: point.sequences - shared], *second.seq_lens) == batch.seq_lens
    logits = torch.arange(batch.num_rows, dtype=torch.float32)
    parts = (logits[: point.rows], logits[point.rows :])
    wanted = [part[child.logit_rows] for part, child in zip(parts, children, strict=True)]
    assert torch.equal(merge_logits(wanted), logits[batch.logit_rows])
    known = attrs.evolve(batch, host_logit_rows=tuple(batch.logit_rows.tolist()))
    for child, other in zip(children, split_batch(known, point, (children[0].step, children[1].step)), strict=True):
        assert torch.equal(child.logit_rows, other.logit_rows)
        assert other.host_logit_rows == tuple(other.logit_rows.tolist())


def test_every_field_of_a_batch_has_a_rule_and_every_recomputed_one_a_function():
    rules = {field.name: field.metadata.get(SPLIT_RULE) for field in attrs.fields(ForwardBatch)}
    assert all(isinstance(rule, SplitRule) for rule in rules.values()), rules
    assert {name for name, rule in rules.items() if rule is SplitRule.RECOMPUTE} == set(RECOMPUTED)


@attrs.frozen(kw_only=True, eq=False)
class WithoutRule(ForwardBatch):
    extra: int = 0


@attrs.frozen(kw_only=True, eq=False)
class Refusing(ForwardBatch):
    tree: object = split_field(SplitRule.REFUSE, default=None)


@attrs.frozen(kw_only=True, eq=False)
class RecomputedByNobody(ForwardBatch):
    sums: object = split_field(SplitRule.RECOMPUTE, default=None)


def test_a_field_without_a_rule_is_refused():
    with pytest.raises(BatchSplitError, match="'extra' has the split rule None"):
        split(ForwardMode.DECODE, [1, 1], batch_class=WithoutRule)


def test_a_field_that_refuses_is_refused_only_when_it_is_set():
    split(ForwardMode.DECODE, [1, 1], batch_class=Refusing)
    with pytest.raises(BatchSplitError, match="with tree cannot be split"):
        split(ForwardMode.DECODE, [1, 1], batch_class=Refusing, tree=object())


def test_a_field_that_is_recomputed_by_nobody_is_refused():
    with pytest.raises(BatchSplitError, match="'sums' has the split rule"):
        split(ForwardMode.DECODE, [1, 1], batch_class=RecomputedByNobody)


def test_plans_for_another_cut_are_refused():
    batch = batch_of(ForwardMode.DECODE, [1, 1, 1, 1], [0] * 4, overlap_rows=1)
    plans = child_plans(batch.step, resolve_sizes(ranks=1))
    with pytest.raises(BatchSplitError, match="cut after 2 of 4 rows, but the plans were made for 1 and 3"):
        split_batch(batch, SplitPoint(rows=2, sequences=2), plans)
