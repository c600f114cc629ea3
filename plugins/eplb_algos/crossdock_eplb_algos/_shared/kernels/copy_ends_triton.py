# mypy: ignore-errors
# pyright: basic
"""``whole_ends`` and ``own_ends``: one program a row, with all ranks in a vector."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def whole_ends_kernel(
    shares_ptr,
    tokens_ptr,
    experts_ptr,
    ends_ptr,
    num_experts,
    num_ranks,
    parts: tl.constexpr,
    ranks_block: tl.constexpr,
):
    # shares [M, R] float32, tokens [E] int64, experts [M] int64 -> ends [M, R] int64.
    row = tl.program_id(0)
    rank = tl.arange(0, ranks_block)
    expert = tl.load(experts_ptr + row)
    tokens = tl.load(tokens_ptr + expert, mask=expert < num_experts, other=0)

    # Sums of integers, rounded; the last rank with a share gets what that lost, and those behind it have none.
    share = tl.load(shares_ptr + row * num_ranks + rank, mask=rank < num_ranks, other=0.0)
    last = tl.max(tl.where(share > 0, rank + 1, 0), axis=0) - 1
    last = tl.where(last < 0, num_ranks - 1, last)
    sums = tl.cumsum((share * parts + 0.5).to(tl.int64), axis=0)
    rounded = (sums + parts // 2) // parts
    ends = tl.where(rank >= last, tokens, tl.minimum(rounded, tokens))
    tl.store(ends_ptr + row * num_ranks + rank, ends, mask=rank < num_ranks)


@triton.jit
def _part_below(ends, parts, limit):
    return tl.maximum(tl.minimum(tl.minimum(ends, limit) - (ends - parts), parts), 0)


@triton.jit
def own_ends_kernel(
    ends_ptr,
    counts_ptr,
    experts_ptr,
    own_ends_ptr,
    num_experts,
    num_ranks,
    own_rank,
    num_nodes,
    ranks_block: tl.constexpr,
):
    # ends [M, R] int64, counts [R, E] int64, experts [M] int64 -> own_ends [M, R] int64.
    row = tl.program_id(0)
    rank = tl.arange(0, ranks_block)
    inside = rank < num_ranks
    expert = tl.load(experts_ptr + row)
    used = tl.where(expert < num_experts, num_ranks, 0)
    held = tl.load(counts_ptr + rank * num_experts + expert, mask=rank < used, other=0)
    place = row * num_ranks + rank
    end = tl.load(ends_ptr + place, mask=inside, other=0)
    wanted = end - tl.load(ends_ptr + place - 1, mask=inside & (rank > 0), other=0)

    # To itself as much as fits.
    stays = tl.minimum(held, wanted)
    own = tl.where(rank == own_rank, stays, 0)
    held -= stays
    wanted -= stays

    # Then inside each node, then everywhere: tokens and places laid end to end in rank order.
    size = num_ranks // num_nodes
    for group in range(num_nodes + 1):
        first = tl.where(group < num_nodes, group * size, 0)
        behind = tl.where(group < num_nodes, first + size, num_ranks)
        member = (rank >= first) & (rank < behind)
        tokens = tl.where(member, held, 0)
        places = tl.where(member, wanted, 0)
        token_ends = tl.cumsum(tokens, axis=0)
        place_ends = tl.cumsum(places, axis=0)
        mine = tl.sum(tl.where(rank == own_rank, tokens, 0), axis=0)
        my_end = tl.sum(tl.where(rank == own_rank, token_ends, 0), axis=0)
        overlap = tl.minimum(my_end, place_ends) - tl.maximum(my_end - mine, place_ends - places)
        own += tl.where(member, tl.maximum(overlap, 0), 0)
        matched = tl.minimum(tl.sum(tokens, axis=0), tl.sum(places, axis=0))
        held -= _part_below(token_ends, tokens, matched)
        wanted -= _part_below(place_ends, places, matched)
    tl.store(own_ends_ptr + place, tl.cumsum(own, axis=0), mask=inside)
