# mypy: ignore-errors
# pyright: basic
"""``whole_ends`` and ``own_ends``: one program a row, with all ranks side by side."""

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
def _ends_everywhere(parts):
    # [nodes, ranks of a node] -> inclusive sums in rank order.
    totals = tl.sum(parts, axis=1)
    return tl.cumsum(parts, axis=1) + (tl.cumsum(totals, axis=0) - totals)[:, None]


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
    nodes_block: tl.constexpr,
    node_ranks_block: tl.constexpr,
):
    # ends [M, R] int64, counts [R, E] int64, experts [M] int64 -> own_ends [M, R] int64.
    row = tl.program_id(0)
    node = tl.arange(0, nodes_block)
    index = tl.arange(0, node_ranks_block)
    size = num_ranks // num_nodes
    rank = node[:, None] * size + index[None, :]
    inside = (node[:, None] < num_nodes) & (index[None, :] < size)
    is_own = inside & (rank == own_rank)
    expert = tl.load(experts_ptr + row)
    used = tl.where(expert < num_experts, num_ranks, 0)
    held = tl.load(counts_ptr + rank * num_experts + expert, mask=inside & (rank < used), other=0)
    place = row * num_ranks + rank
    end = tl.load(ends_ptr + place, mask=inside, other=0)
    wanted = end - tl.load(ends_ptr + place - 1, mask=inside & (rank > 0), other=0)

    # To itself as much as fits.
    stays = tl.minimum(held, wanted)
    own = tl.where(is_own, stays, 0)
    held -= stays
    wanted -= stays

    # Then inside each node: tokens and places laid end to end in rank order.
    token_ends = tl.cumsum(held, axis=1)
    place_ends = tl.cumsum(wanted, axis=1)
    mine = tl.sum(tl.where(is_own, held, 0))
    my_end = tl.sum(tl.where(is_own, token_ends, 0))
    overlap = tl.minimum(my_end, place_ends) - tl.maximum(my_end - mine, place_ends - wanted)
    is_near = inside & (node[:, None] == own_rank // size)
    own += tl.where(is_near, tl.maximum(overlap, 0), 0)
    matched = tl.minimum(tl.sum(held, axis=1), tl.sum(wanted, axis=1))[:, None]
    held -= _part_below(token_ends, held, matched)
    wanted -= _part_below(place_ends, wanted, matched)

    # Then everywhere.
    place_ends = _ends_everywhere(wanted)
    mine = tl.sum(tl.where(is_own, held, 0))
    my_end = tl.sum(tl.where(is_own, _ends_everywhere(held), 0))
    overlap = tl.minimum(my_end, place_ends) - tl.maximum(my_end - mine, place_ends - wanted)
    own += tl.where(inside, tl.maximum(overlap, 0), 0)
    tl.store(own_ends_ptr + place, _ends_everywhere(own), mask=inside)
