"""An attention backend in a small world: a poisoned cache, sequences in it, and the dense truth in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from crossdock.attention import make_attention
from crossdock.types.attention import AttentionLayer, AttentionSpec, KvSpec
from crossdock.types.batch import ForwardBatch
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan

PAGE_TOKENS = 4
NUM_HEADS, NOPE, MLA_VALUE = 8, 12, 20
CPU = torch.device("cpu")
GQA = KvSpec(kind="gqa", num_kv_heads=2, head_dim=32, v_head_dim=32)
MLA = KvSpec(kind="mla", kv_lora_rank=32, rope_dim=32)
MLA_ODD = KvSpec(kind="mla", kv_lora_rank=24, rope_dim=8)
"""Sizes that no vector unit divides."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
"""bf16: scores and weights are rounded to 8 bits before they are summed."""


@attrs.define(eq=False)
class CachedSequence:
    """A sequence of the test with everything that attention ever saw of it."""

    pages: list[int]
    rows: torch.Tensor
    """[tokens, ...] cached rows in float64: (k, v) side by side, or the latent."""


class AttentionWorld:
    """Steps of any work against a cache whose untouched slots hold NaN."""

    def __init__(
        self, name: str, kv: KvSpec, dtype: torch.dtype, options: Mapping[str, object], page_count: int = 64
    ) -> None:
        self.kv, self.dtype = kv, dtype
        self.generator = torch.Generator().manual_seed(0)
        spec = AttentionSpec(page_tokens=PAGE_TOKENS, num_heads=NUM_HEADS, kv=kv, dtype=dtype, device=CPU)
        self.attention = make_attention(name, options, spec)
        head = (page_count, PAGE_TOKENS)
        if kv.kind == "gqa":
            cache = tuple(torch.full((*head, kv.num_kv_heads, kv.head_dim), float("nan"), dtype=dtype) for _ in "kv")
            w_uk = w_uv = None
        else:
            cache = (torch.full((*head, kv.kv_lora_rank + kv.rope_dim), float("nan"), dtype=dtype),)
            w_uk = self.draw(NUM_HEADS, NOPE, kv.kv_lora_rank) * 0.3
            w_uv = self.draw(NUM_HEADS, kv.kv_lora_rank, MLA_VALUE) * 0.3
        self.layer = AttentionLayer(layer=0, kv=kv, num_heads=NUM_HEADS, scale=0.25, cache=cache, w_uk=w_uk, w_uv=w_uv)
        self.free = (torch.randperm(page_count - 1, generator=self.generator) + 1).tolist()
        self.sequences: dict[int, CachedSequence] = {}

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def step(self, work: dict[int, int], padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """New rows of these sequences; found and wanted results [rows + padding, heads, dv]."""
        rows = sum(work.values())
        if self.kv.kind == "gqa":
            q = self.draw(rows + padding, NUM_HEADS, self.kv.head_dim)
            k, v = (self.draw(rows + padding, self.kv.num_kv_heads, self.kv.head_dim) for _ in "kv")
            fresh = torch.cat((k, v), dim=2).double()
        else:
            q = self.draw(rows + padding, NUM_HEADS, NOPE + self.kv.rope_dim)
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
        wanted = torch.zeros(q.shape[0], NUM_HEADS, value_dim, dtype=torch.float64)
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
            fold = NUM_HEADS // self.kv.num_kv_heads
            keys, values = rows.repeat_interleave(fold, dim=1).transpose(0, 1).chunk(2, dim=2)
            return keys, values
        assert self.layer.w_uk is not None
        assert self.layer.w_uv is not None
        latent, rotated = rows.split([self.kv.kv_lora_rank, self.kv.rope_dim], dim=1)
        plain = torch.einsum("lr,hnr->hln", latent, self.layer.w_uk.double())
        values = torch.einsum("lr,hrv->hlv", latent, self.layer.w_uv.double())
        return torch.cat((plain, rotated.expand(NUM_HEADS, -1, -1)), dim=2), values


def make_batch(
    pages: Sequence[Sequence[int]], lengths: list[int], rows: list[int], slots: list[int], padding: int
) -> ForwardBatch:
    """A batch of sequences with these pages, lengths and rows in this step, followed by padded rows."""
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


def check_close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises ``AssertionError`` for another dtype, shape, or a difference beyond rounding."""
    assert found.dtype == dtype, f"the result is {found.dtype}, not {dtype}"
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
