"""Which part of a dimension a rank holds."""

from __future__ import annotations

import pytest
from crossdock.errors import CheckpointError
from crossdock.groups import rank_place, resolve_sizes
from crossdock.types.layout import COMPLETE, SumAxis
from crossdock_models._shared.shards import balanced_shard, expert_shard, head_shard, kv_head_shard, summed_shard

WORLD = frozenset({SumAxis.MOE_EP, SumAxis.MOE_TP})


@pytest.mark.parametrize(("size", "parts"), [(97, 4), (3, 4), (0, 2), (8, 8), (1, 1)])
def test_parts_cover_a_dimension_once_and_differ_by_at_most_one(size: int, parts: int) -> None:
    shards = [balanced_shard(size, parts, index) for index in range(parts)]
    assert [i for shard in shards for i in range(shard.start, shard.stop)] == list(range(size))
    assert max(shard.size for shard in shards) - min(shard.size for shard in shards) <= 1


def test_more_ranks_than_key_heads_hold_the_key_head_of_their_queries() -> None:
    sizes = resolve_sizes(ranks=4, attn_tp_size=4)
    held = [kv_head_shard(2, sizes, rank_place(sizes, rank)) for rank in range(4)]
    assert [(shard.start, shard.stop) for shard in held] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    queries = [head_shard(8, sizes, rank_place(sizes, rank)) for rank in range(4)]
    for query, key in zip(queries, held, strict=True):
        assert {head // 4 for head in range(query.start, query.stop)} == {key.start}


def test_heads_that_cannot_be_split_are_refused_with_numbers() -> None:
    sizes = resolve_sizes(ranks=4, attn_tp_size=4)
    with pytest.raises(CheckpointError, match="6 attention heads cannot be split over attn_tp_size 4"):
        head_shard(6, sizes, rank_place(sizes, 0))
    with pytest.raises(CheckpointError, match="3 key heads and attn_tp_size 4"):
        kv_head_shard(3, sizes, rank_place(sizes, 0))


def test_an_expert_that_cannot_be_split_is_refused_with_what_works() -> None:
    sizes = resolve_sizes(ranks=4, moe_ep_size=1, moe_tp_size=4)
    with pytest.raises(CheckpointError, match="moe_intermediate_size 30 cannot be split over moe_tp_size 4"):
        expert_shard(30, sizes, rank_place(sizes, 0), fp8_block=False)
    assert expert_shard(512, sizes, rank_place(sizes, 3), fp8_block=True).start == 384


@pytest.mark.parametrize("moe_ep", [1, 2, 4])
def test_parts_of_a_summed_dimension_cover_it_over_the_ranks_that_owe_the_sum(moe_ep: int) -> None:
    sizes = resolve_sizes(ranks=4, attn_dp_size=2, moe_ep_size=moe_ep, moe_tp_size=4 // moe_ep)
    places = [rank_place(sizes, rank) for rank in range(4)]
    everyone = [summed_shard(10, WORLD, sizes, place) for place in places]
    assert sorted(i for part in everyone for i in range(part.start, part.stop)) == list(range(10))
    replica = [summed_shard(10, frozenset({SumAxis.ATTN_TP}), sizes, place) for place in places]
    assert [(part.start, part.stop) for part in replica] == [(0, 5), (5, 10)] * 2
    assert all(summed_shard(10, COMPLETE, sizes, place).size == 10 for place in places)
