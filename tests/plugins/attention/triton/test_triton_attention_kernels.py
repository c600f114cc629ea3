"""The Triton attention kernels against their torch twins: interpreted where there is no GPU (fp32), compiled where there is one."""

from __future__ import annotations

import importlib.util
import math

import attrs
import pytest
import torch
from crossdock.errors import MisuseError
from crossdock_attention.attention.triton.kernels.paged_decode import (
    GQA_TILE,
    LATENT_TILE,
    WIDE_LATENT_TILE,
    DecodeHeads,
    NewRows,
    choose_splits,
    latent_group,
    paged_decode,
)
from crossdock_attention.attention.triton.kernels.paged_decode_torch import paged_decode_torch
from crossdock_attention.attention.triton.kernels.prefill import (
    GQA_PREFILL,
    MLA_PREFILL,
    PrefillTile,
    prefill,
    query_blocks,
    stages_that_fit,
)
from crossdock_attention.attention.triton.kernels.prefill_torch import prefill_torch
from crossdock_attention.attention.triton.kernels.store_rows import store_rows
from crossdock_attention.attention.triton.kernels.store_rows_torch import store_rows_torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `interpreter`)"
)

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TOLERANCE = 2e-2 if ON_GPU else 2e-5
"""bf16 weights of the softmax; fp32: another order of summation."""
PAGE_TOKENS = 4
SMALL = PrefillTile(rows=16, tokens=64, warps=4, stages=2)


def pools(pages: int, key_heads: int, dims: tuple[int, ...]) -> tuple[list[torch.Tensor], torch.Generator]:
    """Random pools whose page 0 (scratch) is poisoned."""
    generator = torch.Generator().manual_seed(pages)
    made = []
    for dim in dims:
        pool = torch.randn(pages, PAGE_TOKENS, key_heads, dim, generator=generator)
        pool[0] = float("nan")
        made.append(pool.to(DEVICE, DTYPE))
    return made, generator


def table_of(lengths: list[int], generator: torch.Generator) -> torch.Tensor:
    """Pages in random order, page 0 in unused columns."""
    needed = [-(-length // PAGE_TOKENS) for length in lengths]
    order = (torch.randperm(sum(needed), generator=generator) + 1).to(torch.int32)
    table = torch.zeros(len(lengths), max([*needed, 1]) + 1, dtype=torch.int32)
    for row, (count, pages) in enumerate(zip(needed, order.split(needed), strict=True)):
        table[row, :count] = pages
    return table.to(DEVICE)


def arrivals_of(q: torch.Tensor, key_heads: int) -> torch.Tensor:
    return torch.zeros(q.shape[0] * key_heads, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("lengths", [[1], [3, 4, 5, 8, 9], [0, 70, 1], [130]])
def test_gqa_decode_equals_a_dense_softmax_at_every_page_boundary(lengths: list[int], splits: int) -> None:
    (k_pool, v_pool), generator = pools(60, 2, (16, 24))
    table = table_of(lengths, generator)
    q = torch.randn(len(lengths), 6, 16, generator=generator).to(DEVICE, DTYPE)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    got = paged_decode(q, k_pool, v_pool, table, seq_lens, 0.25, splits, arrivals=arrivals_of(q, 2))
    want = paged_decode_torch(q, k_pool, v_pool, table, seq_lens, 0.25)
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("lengths", [[1, 33], [64, 0]])
def test_mla_decode_takes_the_front_of_the_key_as_value(lengths: list[int]) -> None:
    (latent,), generator = pools(40, 1, (40,))
    table = table_of(lengths, generator)
    q = torch.randn(len(lengths), 5, 40, generator=generator).to(DEVICE, DTYPE)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    got = paged_decode(
        q[..., :32], latent, None, table, seq_lens, 0.2, 2, q_rest=q[..., 32:], arrivals=arrivals_of(q, 1)
    )
    want = paged_decode_torch(q, latent, latent[..., :32], table, seq_lens, 0.2)
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("latent", "slices"), [(False, 1), (True, 1), (True, 2)])
def test_a_step_attends_to_its_own_row_and_leaves_it_in_the_cache(splits: int, latent: bool, slices: int) -> None:
    """Twice with the same counters: the cached rows of the second call are those that the first one stored."""
    lengths = [1, 4, 5, 0, 70, 131]
    dims = (40,) if latent else (16, 24)
    made, generator = pools(80, 1 if latent else 2, dims)
    truth = [pool.clone() for pool in made]
    table = table_of(lengths, generator)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    q = torch.randn(len(lengths), 6, dims[0], generator=generator).to(DEVICE, DTYPE)
    packed = torch.randn(len(lengths), 2 * sum(dims) + 3, generator=generator).to(DEVICE, DTYPE)
    new = (
        [packed[:, :40].unflatten(1, (1, 40))]
        if latent
        else [packed[:, :32].unflatten(1, (2, 16)), packed[:, 32:80].unflatten(1, (2, 24))]
    )
    slots = torch.tensor(
        [
            int(table[i, (n - 1) // PAGE_TOKENS]) * PAGE_TOKENS + (n - 1) % PAGE_TOKENS if n else 0
            for i, n in enumerate(lengths)
        ],
        device=DEVICE,
    )
    live = torch.tensor([n > 0 for n in lengths], device=DEVICE)
    for pool, rows in zip(truth, new, strict=True):
        pool.flatten(0, 1)[slots[live]] = rows[live]
    arrivals = arrivals_of(q, 2)
    step = NewRows(k=new[0], v=None if latent else new[1], slots=slots)
    for _ in range(2):
        contexts = [
            paged_decode(
                some[..., :32] if latent else some,
                made[0],
                None if latent else made[1],
                table,
                seq_lens,
                0.2,
                splits,
                q_rest=some[..., 32:] if latent else None,
                new=step,
                arrivals=arrivals,
            )
            for some in q.chunk(slices, dim=1)
        ]
        got = torch.cat(contexts, dim=1)
        want = paged_decode_torch(q, truth[0], truth[0][..., :32] if latent else truth[1], table, seq_lens, 0.2)
        torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)
        assert not arrivals.any()
    for mine, theirs in zip(made, truth, strict=True):
        assert torch.equal(mine[1:], theirs[1:])


def test_no_rows_decode_to_no_rows() -> None:
    (k_pool, v_pool), _ = pools(3, 1, (16, 16))
    empty = torch.empty(0, 2, 16, device=DEVICE, dtype=DTYPE)
    table, lengths = torch.empty(0, 1, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    assert paged_decode(empty, k_pool, v_pool, table, lengths, 1.0, 1).shape == (0, 2, 16)


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (24, 16)])
def test_prefill_sees_its_prefix_and_nothing_after_itself(paged: bool, key_dim: int, value_dim: int) -> None:
    (k_pool, v_pool), generator = pools(60, 2, (key_dim, value_dim))
    rows, prefixes = [1, 20, 33, 5], [7, 0, 12, 61]
    lengths = [row + prefix for row, prefix in zip(rows, prefixes, strict=True)]
    table = table_of(lengths, generator)
    starts = [sum(rows[:i]) for i in range(len(rows))]
    q = torch.randn(sum(rows) + 3, 4, key_dim, generator=generator).to(DEVICE, DTYPE)
    contexts = []
    for sequence, length in enumerate(lengths):
        pages = table[sequence, : -(-length // PAGE_TOKENS)].long()
        contexts.append(tuple(pool[pages].flatten(0, 1)[:length] for pool in (k_pool, v_pool)))
    spans = list(zip(range(4), starts, rows, prefixes, strict=True))
    blocks = torch.tensor(query_blocks(spans, 16), dtype=torch.int32, device=DEVICE)
    got = torch.zeros(q.shape[0], 4, value_dim, device=DEVICE, dtype=DTYPE)
    want = got.clone()
    if paged:
        k, v = k_pool.flatten(0, 1), v_pool.flatten(0, 1)
        prefill(q, k, v, got, blocks, 0.3, page_table=table, page_tokens=PAGE_TOKENS, tile=SMALL)
    else:
        k, v = (torch.cat([context[i] for context in contexts]) for i in (0, 1))
        firsts = torch.tensor([sum(lengths[:i]) for i in range(4)], dtype=torch.int32, device=DEVICE)
        prefill(q, k, v, got, blocks, 0.3, kv_starts=firsts, tile=SMALL)
    prefill_torch(q, contexts, [(s, s + r) for s, r in zip(starts, rows, strict=True)], want, 0.3)
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def test_query_blocks_cover_each_row_once_longest_context_first() -> None:
    blocks = query_blocks([(0, 0, 300, 10), (1, 300, 1, 4000)], 128)
    assert blocks == [(1, 300, 1, 4000), (0, 256, 44, 266), (0, 128, 128, 138), (0, 0, 128, 10)]


def test_tiles_of_float32_take_fewer_stages() -> None:
    assert stages_that_fit(GQA_PREFILL, 128, 128, 2) == GQA_PREFILL.stages
    assert stages_that_fit(MLA_PREFILL, 192, 128, 2) == MLA_PREFILL.stages
    assert stages_that_fit(GQA_PREFILL, 128, 128, 4) == 2
    assert stages_that_fit(MLA_PREFILL, 192, 128, 4) == 1


def test_splits_fill_the_device_without_cutting_below_a_block() -> None:
    assert choose_splits(1, 4, 10_000, GQA_TILE) == 32
    assert choose_splits(256, 4, 10_000, GQA_TILE) == 1
    assert choose_splits(32, 4, 10_000, GQA_TILE) == 4
    assert choose_splits(1, 4, 65, GQA_TILE) == 2
    assert choose_splits(1, 4, 1, GQA_TILE) == 1
    assert choose_splits(256, 1, 8192, LATENT_TILE) == 1
    assert choose_splits(32, 1, 8192, LATENT_TILE) == 8


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("dims", [(3, 8, 5), (40,)])
def test_rows_are_stored_at_their_slots_whatever_their_stride(rows: int, dims: tuple[int, ...]) -> None:
    """Keys and values as a GQA layer hands them over (slices of one product), and the latent row of MLA."""
    generator = torch.Generator().manual_seed(rows)
    shapes = [(dims[0], dims[1]), (dims[0], dims[2])] if len(dims) == 3 else [dims]
    got = [torch.zeros(4, PAGE_TOKENS, *shape, device=DEVICE, dtype=DTYPE) for shape in shapes]
    want = [pool.clone() for pool in got]
    width = sum(math.prod(shape) for shape in shapes)
    packed = torch.randn(rows, width + 3, generator=generator).to(DEVICE, DTYPE)[:, :width]
    values = [
        part.unflatten(1, shape)
        for part, shape in zip(packed.split([math.prod(shape) for shape in shapes], 1), shapes, strict=True)
    ]
    slots = torch.randperm(4 * PAGE_TOKENS, generator=generator)[:rows].to(DEVICE)
    store_rows(slots, values, got)
    store_rows_torch(slots, values, want)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)


def test_rows_of_another_size_are_not_stored() -> None:
    pool = torch.zeros(2, PAGE_TOKENS, 3, device=DEVICE, dtype=DTYPE)
    with pytest.raises(MisuseError, match="do not fit pools"):
        store_rows(torch.zeros(1, dtype=torch.int64, device=DEVICE), (pool[0, :1, :2],), (pool,))


def test_latent_heads_are_cut_into_equal_groups() -> None:
    assert [latent_group(heads, LATENT_TILE) for heads in (1, 5, 16, 17, 72, 128)] == [1, 5, 16, 1, 12, 16]
    assert [latent_group(heads, WIDE_LATENT_TILE) for heads in (16, 64, 128)] == [16, 64, 64]


def test_wide_groups_of_latent_heads_are_for_rows_that_fill_the_device() -> None:
    heads = DecodeHeads(num_heads=128, key_heads=1, is_latent=True, element_bytes=2)
    assert [heads.tile(rows) is WIDE_LATENT_TILE for rows in (1, 8, 23, 24, 512)] == [False, False, False, True, True]
    assert [heads.groups(heads.tile(rows)) for rows in (1, 128)] == [8, 2]
    assert [choose_splits(rows, 2, 4096, WIDE_LATENT_TILE) for rows in (24, 32, 128)] == [2, 2, 1]
    assert attrs.evolve(heads, element_bytes=4).tile(512) is LATENT_TILE
    assert attrs.evolve(heads, num_heads=16).tile(512) is LATENT_TILE
    assert attrs.evolve(heads, is_latent=False, key_heads=8).tile(512) is GQA_TILE


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("num_heads", [36, 64])
def test_many_latent_heads_share_the_cached_rows_in_groups(num_heads: int, splits: int) -> None:
    (latent,), generator = pools(60, 1, (40,))
    lengths = [33, 130]
    table = table_of(lengths, generator)
    q = torch.randn(2, num_heads, 40, generator=generator).to(DEVICE, DTYPE)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    tile = LATENT_TILE if num_heads < 64 else WIDE_LATENT_TILE
    arrivals = arrivals_of(q, num_heads // latent_group(num_heads, tile))
    got = paged_decode(
        q[..., :32], latent, None, table, seq_lens, 0.2, splits, q_rest=q[..., 32:], arrivals=arrivals, tile=tile
    )
    want = paged_decode_torch(q, latent, latent[..., :32], table, seq_lens, 0.2)
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_part_of_the_keys_that_all_heads_share_may_come_apart() -> None:
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(50, 2, 96, generator=generator).to(DEVICE, DTYPE)
    packed = torch.randn(50, 2 * 64 + 32 + 8, generator=generator).to(DEVICE, DTYPE)
    keys, rest = packed[:, :128].unflatten(1, (2, 64)), packed[:, 128:160].unsqueeze(1)
    values = torch.randn(50, 2, 64, generator=generator).to(DEVICE, DTYPE)
    blocks = torch.tensor(query_blocks([(0, 0, 50, 0)], SMALL.rows), dtype=torch.int32, device=DEVICE)
    starts = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    got, want = (torch.zeros(50, 2, 64, device=DEVICE, dtype=DTYPE) for _ in range(2))
    prefill(q, keys, values, got, blocks, 0.2, kv_starts=starts, k_rest=rest, tile=SMALL)
    complete = torch.cat((keys, rest.expand(-1, 2, -1)), dim=2)
    prefill_torch(q, [(complete, values)], [(0, 50)], want, 0.2)
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(128, 128), (192, 128)])
@pytest.mark.parametrize("length", [1, 63, 64, 200, 1030])
def test_the_tiles_that_are_used_are_right_on_the_device(dims: tuple[int, int], length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(length, 4, dims[0], generator=generator).to(DEVICE, DTYPE)
    keys, values = (torch.randn(length, 2, dim, generator=generator).to(DEVICE, DTYPE) for dim in dims)
    tile = GQA_PREFILL if dims[0] == 128 else MLA_PREFILL
    blocks = torch.tensor(query_blocks([(0, 0, length, 0)], tile.rows), dtype=torch.int32, device=DEVICE)
    starts = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    got, want = (torch.zeros(length, 4, dims[1], device=DEVICE, dtype=DTYPE) for _ in range(2))
    prefill(q, keys, values, got, blocks, 0.1, kv_starts=starts, tile=tile)
    prefill_torch(q, [(keys, values)], [(0, length)], want, 0.1)
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)
