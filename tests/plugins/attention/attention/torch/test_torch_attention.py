"""Paged attention in torch against dense attention in float64: every form, mixed batches, poisoned pages, bad tables."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
import torch
from crossdock.attention import make_attention
from crossdock.errors import MisuseError
from crossdock.native_code import native_code
from crossdock.types.attention import AttentionLayer, AttentionSpec, KvSpec
from crossdock.types.batch import ForwardBatch
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan

PAGE_TOKENS = 4
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
"""bf16: scores and weights are rounded to 8 bits before they are summed."""
GQA = KvSpec(kind="gqa", num_kv_heads=2, head_dim=32, v_head_dim=32)
MLA = KvSpec(kind="mla", kv_lora_rank=32, rope_dim=32)
MLA_WIDE = KvSpec(kind="mla", kv_lora_rank=24, rope_dim=8)
"""Sizes that the kernel does not read."""
HEADS, NOPE, MLA_VALUE = 8, 12, 20


@attrs.define(eq=False)
class CachedSequence:
    """A sequence of the test with everything that attention ever saw of it."""

    pages: list[int]
    rows: torch.Tensor
    """[tokens, ...] cached rows in float64: (k, v) side by side, or the latent."""


class World:
    """A cache, sequences in it, and the dense truth."""

    def __init__(self, kv: KvSpec, dtype: torch.dtype, options: dict[str, object], page_count: int = 64) -> None:
        self.kv, self.dtype = kv, dtype
        self.generator = torch.Generator().manual_seed(0)
        spec = AttentionSpec(page_tokens=PAGE_TOKENS, num_heads=HEADS, kv=kv, dtype=dtype, device=CPU)
        self.attention = make_attention("torch", options, spec)
        head = (page_count, PAGE_TOKENS)
        if kv.kind == "gqa":
            cache = tuple(torch.full((*head, kv.num_kv_heads, kv.head_dim), float("nan"), dtype=dtype) for _ in "kv")
            w_uk = w_uv = None
        else:
            cache = (torch.full((*head, kv.kv_lora_rank + kv.rope_dim), float("nan"), dtype=dtype),)
            w_uk = self.draw(HEADS, NOPE, kv.kv_lora_rank) * 0.3
            w_uv = self.draw(HEADS, kv.kv_lora_rank, MLA_VALUE) * 0.3
        self.layer = AttentionLayer(layer=0, kv=kv, num_heads=HEADS, scale=0.25, cache=cache, w_uk=w_uk, w_uv=w_uv)
        self.free = (torch.randperm(page_count - 1, generator=self.generator) + 1).tolist()
        self.sequences: dict[int, CachedSequence] = {}

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def step(self, work: dict[int, int], padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """New rows of these sequences; found and wanted results [rows + padding, heads, dv]."""
        rows = sum(work.values())
        if self.kv.kind == "gqa":
            q = self.draw(rows + padding, HEADS, self.kv.head_dim)
            k, v = (self.draw(rows + padding, self.kv.num_kv_heads, self.kv.head_dim) for _ in "kv")
            fresh = torch.cat((k, v), dim=2).double()
        else:
            q = self.draw(rows + padding, HEADS, NOPE + self.kv.rope_dim)
            k, v = self.draw(rows + padding, self.kv.kv_lora_rank + self.kv.rope_dim), None
            fresh = k.double()
        slots: list[int] = []
        start = 0
        for sequence, count in work.items():
            known = self.sequences.setdefault(sequence, CachedSequence([], fresh[:0]))
            first = known.rows.shape[0]
            known.rows = torch.cat((known.rows, fresh[start : start + count]))
            while len(known.pages) * PAGE_TOKENS < first + count:
                known.pages.append(self.free.pop())
            slots += [
                known.pages[t // PAGE_TOKENS] * PAGE_TOKENS + t % PAGE_TOKENS for t in range(first, first + count)
            ]
            start += count
        batch = make_batch(
            [self.sequences[sequence].pages for sequence in work],
            [self.sequences[sequence].rows.shape[0] for sequence in work],
            list(work.values()),
            slots,
            padding,
        )
        found = self.attention.forward(q, k, v, self.layer, self.attention.plan(batch))
        return found, self.dense(q, work)

    def dense(self, q: torch.Tensor, work: dict[int, int]) -> torch.Tensor:
        value_dim = self.kv.v_head_dim if self.kv.kind == "gqa" else MLA_VALUE
        wanted = torch.zeros(q.shape[0], HEADS, value_dim, dtype=torch.float64)
        row = 0
        for sequence, count in work.items():
            keys, values = self.expanded(self.sequences[sequence].rows)
            total = keys.shape[1]
            for i in range(count):
                seen = total - count + i + 1
                scores = torch.einsum("hd,hld->hl", q[row].double(), keys[:, :seen]) * 0.25
                wanted[row] = torch.einsum("hl,hld->hd", scores.softmax(-1), values[:, :seen])
                row += 1
        return wanted

    def expanded(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of every query head, [heads, tokens, dim] float64."""
        if self.kv.kind == "gqa":
            fold = HEADS // self.kv.num_kv_heads
            keys, values = rows.repeat_interleave(fold, dim=1).transpose(0, 1).chunk(2, dim=2)
            return keys, values
        assert self.layer.w_uk is not None
        assert self.layer.w_uv is not None
        latent, rotated = rows.split([self.kv.kv_lora_rank, self.kv.rope_dim], dim=1)
        plain = torch.einsum("lr,hnr->hln", latent, self.layer.w_uk.double())
        values = torch.einsum("lr,hrv->hlv", latent, self.layer.w_uv.double())
        return torch.cat((plain, rotated.expand(HEADS, -1, -1)), dim=2), values


def make_batch(
    pages: Sequence[Sequence[int]], lengths: list[int], rows: list[int], slots: list[int], padding: int
) -> ForwardBatch:
    width = max((len(row) for row in pages), default=1)
    total = sum(rows) + padding
    plan = StepPlan(
        step=0,
        eplb_pass=0,
        live_tokens=(sum(rows),),
        padded_tokens=(total,),
        padding_mode=PaddingMode.MAX_LEN,
        forward_mode=ForwardMode.MIXED,
        dispatch_mode=DispatchMode.NORMAL,
        overlap=False,
        overlap_reason="",
    )
    return ForwardBatch(
        input_ids=torch.zeros(total, dtype=torch.int64),
        positions=torch.zeros(total, dtype=torch.int64),
        kv_slots=torch.tensor(slots + [0] * padding, dtype=torch.int64),
        page_table=torch.tensor([[*row, *[0] * (width - len(row))] for row in pages], dtype=torch.int32).view(
            -1, width
        ),
        seq_lens=tuple(lengths),
        query_lens=tuple(rows),
        logit_rows=torch.zeros(0, dtype=torch.int64),
        forward_mode=ForwardMode.MIXED,
        step=plan,
        attn_dp_rank=0,
        num_live_tokens=sum(rows),
    )


CASES = [
    pytest.param(kv, dtype, options, id=f"{kv.kind}-{kv.kv_lora_rank}-{str(dtype)[6:]}-{options or 'auto'}")
    for kv in (GQA, MLA, MLA_WIDE)
    for dtype in TOLERANCE
    for options in ({}, {"decode": "gather"}, {"decode": "gather", "padding_share": 0.0, "block_rows": 3})
]


def check(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("kv", "dtype", "options"), CASES)
def test_decode_through_every_length_around_a_page_with_poisoned_pages(
    kv: KvSpec, dtype: torch.dtype, options: dict[str, object]
) -> None:
    """Free pages, the scratch page and slots behind a sequence's end hold NaN; none of it may be read."""
    world = World(kv, dtype, options)
    world.step({0: 2, 1: 7})
    for _ in range(8):
        check(*world.step({0: 1, 1: 1}), dtype)


@pytest.mark.parametrize(("kv", "dtype", "options"), CASES)
def test_prefill_in_one_go_in_chunks_and_mixed_with_decode(
    kv: KvSpec, dtype: torch.dtype, options: dict[str, object]
) -> None:
    world = World(kv, dtype, options)
    for work in ({0: 9}, {1: 3, 0: 4}, {0: 1, 2: 6, 1: 1}, {3: 1}, {2: 5, 3: 1, 0: 2, 1: 1}):
        check(*world.step(work), dtype)


@pytest.mark.parametrize(("kv", "dtype", "options"), CASES)
@pytest.mark.parametrize("work", [{}, {0: 1}, {0: 3, 1: 1}])
def test_padded_rows_of_the_result_are_zero(
    kv: KvSpec, dtype: torch.dtype, options: dict[str, object], work: dict[int, int]
) -> None:
    found, wanted = World(kv, dtype, options).step(work, padding=3)
    check(found, wanted, dtype)
    assert bool((found[-3:] == 0).all())


@pytest.mark.parametrize("kv", [GQA, MLA])
def test_no_rows_at_all_give_an_empty_result(kv: KvSpec) -> None:
    found, _ = World(kv, torch.float32, {}).step({})
    assert found.shape == (0, HEADS, GQA.v_head_dim if kv.kind == "gqa" else MLA_VALUE)


def test_one_long_sequence_does_not_stretch_the_others() -> None:
    world = World(GQA, torch.float32, {"decode": "gather"}, page_count=128)
    world.step({0: 200, **dict.fromkeys(range(1, 9), 3)})
    batch_rows = dict.fromkeys(range(9), 1)
    check(*world.step(batch_rows), torch.float32)
    batch = make_batch(
        [world.sequences[i].pages for i in range(9)],
        [world.sequences[i].rows.shape[0] for i in range(9)],
        [1] * 9,
        [0] * 9,
        0,
    )
    groups = world.attention.plan(batch).data.decodes
    assert sorted((group.size, group.length) for group in groups) == [(1, 201), (8, 4)]


def test_few_rows_on_a_long_prefix_are_attended_in_latent_space() -> None:
    """Both forms of a chunk, below and above the number of rows at which expanding the context pays."""
    world = World(MLA, torch.float32, {}, page_count=128)
    world.step({0: 150})
    for rows in (2, 30, 90):
        check(*world.step({0: rows}), torch.float32)


@pytest.mark.parametrize("options", [{}, {"decode": "gather"}])
def test_a_table_that_points_outside_is_refused_before_anything_is_read(options: dict[str, object]) -> None:
    world = World(GQA, torch.float32, options, page_count=8)
    q, k = torch.zeros(1, HEADS, 32), torch.zeros(1, 2, 32)
    with pytest.raises(MisuseError, match="sequence of 9 tokens does not fit its page table of 2 pages"):
        world.attention.plan(make_batch([[1, 2]], [9], [1], [8], 0))
    with pytest.raises(MisuseError, match="page id -1"):
        world.attention.plan(make_batch([[1, -1]], [5], [1], [4], 0))
    for pages, slots in (([1, 8], [4]), ([1, 2], [32])):
        metadata = world.attention.plan(make_batch([pages], [5], [1], slots, 0))
        with pytest.raises(MisuseError, match="the pool has 32"):
            world.attention.forward(q, k, k, world.layer, metadata)


@pytest.mark.skipif(native_code().library is None, reason=native_code().reason)
def test_the_kernel_is_what_runs_by_default_where_there_is_a_compiler() -> None:
    from crossdock_attention.attention.torch.plan import PagedDecodes

    world = World(GQA, torch.float32, {})
    world.step({0: 3})
    plan = world.attention.plan(make_batch([world.sequences[0].pages], [3], [1], [0], 0)).data
    assert [type(group) for group in plan.decodes] == [PagedDecodes]
