"""The ``triton`` backend against the ``torch`` one, two implementations that share no code: mixed batches, GQA and MLA, graph buffers."""

from __future__ import annotations

import importlib.util

import attrs
import pytest
import torch
from crossdock.errors import MisuseError
from crossdock.types.attention import AttentionLayer, AttentionSpec, KvSpec
from crossdock.types.batch import ForwardBatch
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan
from crossdock_attention.attention.torch.attention import TorchAttention
from crossdock_attention.attention.torch.options import TorchAttentionOptions
from crossdock_attention.attention.triton.attention import TritonAttention

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `interpreter`)"
)

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TOLERANCE = 3e-2 if ON_GPU else 2e-5
PAGE_TOKENS, PAGES, HEADS = 4, 64, 4
GQA = KvSpec(kind="gqa", num_kv_heads=2, head_dim=16, v_head_dim=16)
MLA = KvSpec(kind="mla", kv_lora_rank=32, rope_dim=8)
NOPE, VALUE = 16, 16


def make_batch(rows: list[int], prefixes: list[int], padding: int, generator: torch.Generator) -> ForwardBatch:
    lengths = [row + prefix for row, prefix in zip(rows, prefixes, strict=True)]
    needed = [-(-length // PAGE_TOKENS) for length in lengths]
    pages = (torch.randperm(PAGES - 1, generator=generator)[: sum(needed)] + 1).to(torch.int32)
    table = torch.zeros(len(rows), max([*needed, 1]), dtype=torch.int32)
    slots, positions = [], []
    for sequence, own in enumerate(pages.split(needed)):
        table[sequence, : len(own)] = own
        for position in range(prefixes[sequence], lengths[sequence]):
            slots.append(int(own[position // PAGE_TOKENS]) * PAGE_TOKENS + position % PAGE_TOKENS)
            positions.append(position)
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
        input_ids=torch.zeros(total, dtype=torch.int64, device=DEVICE),
        positions=torch.tensor(positions + [0] * padding, dtype=torch.int64, device=DEVICE),
        kv_slots=torch.tensor(slots + [0] * padding, dtype=torch.int64, device=DEVICE),
        page_table=table.to(DEVICE),
        seq_lens=tuple(lengths),
        query_lens=tuple(rows),
        logit_rows=torch.empty(0, dtype=torch.int64, device=DEVICE),
        forward_mode=ForwardMode.MIXED,
        step=plan,
        attn_dp_rank=0,
        num_live_tokens=sum(rows),
    )


def make_layer(kv: KvSpec, generator: torch.Generator) -> AttentionLayer:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, DTYPE)

    if kv.kind == "gqa":
        cache = tuple(random(PAGES, PAGE_TOKENS, kv.num_kv_heads, kv.head_dim) for _ in range(2))
        return AttentionLayer(layer=0, kv=kv, num_heads=HEADS, scale=0.25, cache=cache)
    latent = random(PAGES, PAGE_TOKENS, kv.kv_lora_rank + kv.rope_dim)
    return AttentionLayer(
        layer=0,
        kv=kv,
        num_heads=HEADS,
        scale=0.2,
        cache=(latent,),
        w_uk=random(HEADS, NOPE, kv.kv_lora_rank) / 6,
        w_uv=random(HEADS, kv.kv_lora_rank, VALUE) / 6,
    )


def inputs(
    kv: KvSpec, total: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, DTYPE)

    if kv.kind == "gqa":
        shape = (total, kv.num_kv_heads, kv.head_dim)
        return random(total, HEADS, kv.head_dim), random(*shape), random(*shape)
    return random(total, HEADS, NOPE + kv.rope_dim), random(total, kv.kv_lora_rank + kv.rope_dim), None


def spec_of(kv: KvSpec) -> AttentionSpec:
    return AttentionSpec(page_tokens=PAGE_TOKENS, num_heads=HEADS, kv=kv, dtype=DTYPE, device=DEVICE)


@pytest.mark.parametrize("kv", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize(
    ("rows", "prefixes", "padding"),
    [
        ([1, 1, 1], [0, 3, 20], 0),
        ([5, 1, 9, 1], [0, 7, 6, 4], 3),
        ([3], [0], 1),
        ([1], [11], 2),
        ([], [], 2),
        ([], [], 0),
    ],
)
def test_both_backends_give_the_same_rows_and_the_same_cache(
    kv: KvSpec, rows: list[int], prefixes: list[int], padding: int
) -> None:
    generator = torch.Generator().manual_seed(len(rows) + padding)
    batch = make_batch(rows, prefixes, padding, generator)
    state = generator.get_state()
    results = []
    for backend in (TritonAttention(spec_of(kv)), TorchAttention(TorchAttentionOptions(), spec_of(kv))):
        generator.set_state(state)
        layer = make_layer(kv, generator)
        q, k, v = inputs(kv, batch.num_rows, generator)
        results.append((backend.forward(q, k, v, layer, backend.plan(batch)), layer.cache))
    (got, got_cache), (want, want_cache) = results
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)
    for mine, theirs in zip(got_cache, want_cache, strict=True):
        assert torch.equal(mine[1:], theirs[1:])


@pytest.mark.parametrize("kv", [GQA, MLA], ids=["gqa", "mla"])
def test_a_bucket_gives_live_rows_the_eager_result_and_dead_rows_zero(kv: KvSpec) -> None:
    generator = torch.Generator().manual_seed(9)
    batch = make_batch([1, 1], [5, 12], 2, generator)
    state = generator.get_state()
    backend = TritonAttention(spec_of(kv))
    buffers = backend.allocate_buffers(4, 8)
    results = []
    for storage in (None, buffers):
        generator.set_state(state)
        layer = make_layer(kv, generator)
        q, k, v = inputs(kv, batch.num_rows, generator)
        results.append(backend.forward(q, k, v, layer, backend.plan(batch, storage)))
    torch.testing.assert_close(results[1], results[0], rtol=TOLERANCE, atol=TOLERANCE)
    assert not results[1][2:].any()


@pytest.mark.parametrize("kv", [GQA, MLA], ids=["gqa", "mla"])
def test_rows_of_one_sequence_in_a_bucket_see_one_another_as_in_the_torch_backend(kv: KvSpec) -> None:
    generator = torch.Generator().manual_seed(11)
    rows, prefixes, padding = [5, 1, 9], [0, 7, 6], 3
    batch = make_batch(rows, prefixes, padding, generator)
    state = generator.get_state()
    backend = TritonAttention(spec_of(kv))
    tables = backend.allocate_buffers(batch.num_rows, 5, shares_contexts=True)
    empty = attrs.evolve(batch, page_table=tables.page_table[:0], seq_lens=(), query_lens=())
    metadata = backend.plan(empty, tables)
    sequences = torch.arange(3, device=DEVICE).repeat_interleave(torch.tensor(rows, device=DEVICE))
    live = sum(rows)
    tables.page_table[:live, : batch.page_table.shape[1]] = batch.page_table[sequences]
    tables.seq_lens[:live] = batch.positions[:live] + 1
    layers = [make_layer(kv, generator.set_state(state)) for _ in range(2)]
    q, k, v = inputs(kv, batch.num_rows, generator)
    got = backend.forward(q, k, v, layers[0], metadata)
    torch_backend = TorchAttention(TorchAttentionOptions(), spec_of(kv))
    want = torch_backend.forward(q, k, v, layers[1], torch_backend.plan(batch))
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)
    assert not got[live:].any()
    for mine, theirs in zip(*(layer.cache for layer in layers), strict=True):
        assert torch.equal(mine[1:], theirs[1:])


@pytest.mark.parametrize("sequences", [1, 2, 3, 5])
def test_a_plan_begins_where_compiled_kernels_are_told_that_pointers_are_aligned(sequences: int) -> None:
    batch = make_batch([2] * sequences, [0] * sequences, 0, torch.Generator().manual_seed(0))
    rows = TritonAttention(spec_of(GQA)).plan(batch).data.prefill
    for tensor in (rows.kv_starts, rows.first_rows, rows.blocks):
        assert tensor.data_ptr() % 16 == 0
    assert rows.first_rows.tolist() == [2 * sequence for sequence in range(sequences)]


def test_a_sequence_longer_than_its_page_table_is_refused() -> None:
    batch = make_batch([1], [5], 0, torch.Generator().manual_seed(0))
    short = attrs.evolve(batch, seq_lens=(99,))
    with pytest.raises(MisuseError, match="99 tokens"):
        TritonAttention(spec_of(GQA)).plan(short)
