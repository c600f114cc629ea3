"""The ``torch`` backend in every form, beyond what the conformance suite checks: kernel and gather, grouping, latent chunks, bad tables."""

from __future__ import annotations

import pytest
import torch
from crossdock.errors import MisuseError
from crossdock.native_code import native_code
from crossdock.testing.attention_world import (
    GQA,
    MLA,
    MLA_ODD,
    MLA_VALUE,
    NUM_HEADS,
    TOLERANCE,
    AttentionWorld,
    check_close,
    make_batch,
)
from crossdock.types.attention import KvSpec


def world_of(kv: KvSpec, dtype: torch.dtype, options: dict[str, object], page_count: int = 64) -> AttentionWorld:
    return AttentionWorld("torch", kv, dtype, options, page_count)


CASES = [
    pytest.param(kv, dtype, options, id=f"{kv.kind}-{kv.kv_lora_rank}-{str(dtype)[6:]}-{options or 'auto'}")
    for kv in (GQA, MLA, MLA_ODD)
    for dtype in TOLERANCE
    for options in ({}, {"decode": "gather"}, {"decode": "gather", "padding_share": 0.0, "block_rows": 3})
]


@pytest.mark.parametrize(("kv", "dtype", "options"), CASES)
def test_decode_through_every_length_around_a_page_with_poisoned_pages(
    kv: KvSpec, dtype: torch.dtype, options: dict[str, object]
) -> None:
    """Free pages, the scratch page and slots behind a sequence's end hold NaN; none of it may be read."""
    world = world_of(kv, dtype, options)
    world.step({0: 2, 1: 7})
    for _ in range(8):
        check_close(*world.step({0: 1, 1: 1}), dtype)


@pytest.mark.parametrize(("kv", "dtype", "options"), CASES)
def test_prefill_in_one_go_in_chunks_and_mixed_with_decode(
    kv: KvSpec, dtype: torch.dtype, options: dict[str, object]
) -> None:
    world = world_of(kv, dtype, options)
    for work in ({0: 9}, {1: 3, 0: 4}, {0: 1, 2: 6, 1: 1}, {3: 1}, {2: 5, 3: 1, 0: 2, 1: 1}):
        check_close(*world.step(work), dtype)


@pytest.mark.parametrize(("kv", "dtype", "options"), CASES)
@pytest.mark.parametrize("work", [{}, {0: 1}, {0: 3, 1: 1}])
def test_padded_rows_of_the_result_are_zero(
    kv: KvSpec, dtype: torch.dtype, options: dict[str, object], work: dict[int, int]
) -> None:
    found, wanted = world_of(kv, dtype, options).step(work, padding=3)
    check_close(found, wanted, dtype)
    assert bool((found[-3:] == 0).all())


@pytest.mark.parametrize("kv", [GQA, MLA])
def test_no_rows_at_all_give_an_empty_result(kv: KvSpec) -> None:
    found, _ = world_of(kv, torch.float32, {}).step({})
    assert found.shape == (0, NUM_HEADS, GQA.v_head_dim if kv.kind == "gqa" else MLA_VALUE)


def test_one_long_sequence_does_not_stretch_the_others() -> None:
    world = world_of(GQA, torch.float32, {"decode": "gather"}, page_count=128)
    world.step({0: 200, **dict.fromkeys(range(1, 9), 3)})
    batch_rows = dict.fromkeys(range(9), 1)
    check_close(*world.step(batch_rows), torch.float32)
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
    world = world_of(MLA, torch.float32, {}, page_count=128)
    world.step({0: 150})
    for rows in (2, 30, 90):
        check_close(*world.step({0: rows}), torch.float32)


@pytest.mark.parametrize("options", [{}, {"decode": "gather"}])
def test_a_table_that_points_outside_is_refused_before_anything_is_read(options: dict[str, object]) -> None:
    world = world_of(GQA, torch.float32, options, page_count=8)
    q, k = torch.zeros(1, NUM_HEADS, 32), torch.zeros(1, 2, 32)
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

    world = world_of(GQA, torch.float32, {})
    world.step({0: 3})
    plan = world.attention.plan(make_batch([world.sequences[0].pages], [3], [1], [0], 0)).data
    assert [type(group) for group in plan.decodes] == [PagedDecodes]
