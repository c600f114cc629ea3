# mypy: ignore-errors
# pyright: basic
"""``least_cost``: one program a row finds the nearest copies and what the way of each mixture costs; one program then chooses."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nearest_kernel(
    even_ptr,
    slots_ptr,
    counts_ptr,
    experts_ptr,
    near_ptr,
    ways_ptr,
    num_experts,
    num_ranks,
    num_nodes,
    link_cost,
    node_cost,
    mixtures: tl.constexpr,
    mixtures_block: tl.constexpr,
    nodes_block: tl.constexpr,
    node_ranks_block: tl.constexpr,
):
    # even [M, R] float32, slots [M, R], counts [R, E] and experts [M] int64 -> near [M, R] and ways [M, mixtures_block] float32.
    row = tl.program_id(0)
    node = tl.arange(0, nodes_block)
    index = tl.arange(0, node_ranks_block)
    size = num_ranks // num_nodes
    rank = node[:, None] * size + index[None, :]
    inside = (node[:, None] < num_nodes) & (index[None, :] < size)
    place = row * num_ranks + rank
    expert = tl.load(experts_ptr + row)
    used = tl.where(expert < num_experts, num_ranks, 0)
    held = tl.load(counts_ptr + rank * num_experts + expert, mask=inside & (rank < used), other=0).to(tl.float32)
    holds = tl.load(slots_ptr + place, mask=inside, other=-1) >= 0
    even = tl.load(even_ptr + place, mask=inside, other=0.0)

    # To the own copy; else evenly over the copies of the machine; else evenly over all.
    stays = tl.where(holds, held, 0.0)
    on_node = tl.sum(holds.to(tl.float32), axis=1)
    rest = tl.sum(held - stays, axis=1)
    to_node = tl.where(on_node > 0, rest / tl.maximum(on_node, 1.0), 0.0)
    away = tl.sum(tl.where(on_node > 0, 0.0, rest), axis=0)
    far = away / tl.maximum(tl.sum(on_node, axis=0), 1.0)
    near = stays + tl.where(holds, to_node[:, None] + far, 0.0)
    tl.store(near_ptr + place, near, mask=inside)

    # What leaves a rank, or a machine, in each mixture, when as much as possible stays.
    held_on_node = tl.sum(held, axis=1)
    all_held = tl.sum(held_on_node, axis=0)
    mixture = tl.arange(0, mixtures_block)
    ways = tl.zeros([mixtures_block], dtype=tl.float32)
    for number in tl.static_range(mixtures):
        mixed = near + (number / (mixtures - 1)) * (even - near)
        on_rank = tl.sum(tl.sum(tl.minimum(mixed, held), axis=1), axis=0)
        on_own_node = tl.sum(tl.minimum(tl.sum(mixed, axis=1), held_on_node), axis=0)
        way = link_cost * (on_own_node - on_rank) + node_cost * (all_held - on_own_node)
        ways = tl.where(mixture == number, way, ways)
    tl.store(ways_ptr + row * mixtures_block + mixture, ways)


@triton.jit
def least_cost_kernel(
    even_ptr,
    near_ptr,
    ways_ptr,
    tokens_ptr,
    only_experts_ptr,
    shares_ptr,
    num_experts,
    num_rows,
    num_ranks,
    num_slots,
    mixtures: tl.constexpr,
    mixtures_block: tl.constexpr,
    rows_block: tl.constexpr,
    ranks_block: tl.constexpr,
    slots_block: tl.constexpr,
):
    # even and near [M, R], ways [M, mixtures_block] float32, tokens [E] and only_experts [R, S] int64 -> shares [M, R] float32.
    row = tl.arange(0, rows_block)
    rank = tl.arange(0, ranks_block)
    slot = tl.arange(0, slots_block)
    inside = (row[:, None] < num_rows) & (rank[None, :] < num_ranks)
    place = row[:, None] * num_ranks + rank[None, :]
    even = tl.load(even_ptr + place, mask=inside, other=0.0)
    near = tl.load(near_ptr + place, mask=inside, other=0.0)

    # What ranks have anyway.
    is_slot = (rank[:, None] < num_ranks) & (slot[None, :] < num_slots)
    only = tl.load(only_experts_ptr + rank[:, None] * num_slots + slot[None, :], mask=is_slot, other=num_experts)
    fixed = tl.load(tokens_ptr + only, mask=only < num_experts, other=0).to(tl.float32)
    base = tl.sum(fixed, axis=1)

    # Loads are linear in the part of the even split. The first of equals, as in the torch twin.
    mixture = tl.arange(0, mixtures_block)
    is_way = (row[:, None] < num_rows) & (mixture[None, :] < mixtures)
    ways = tl.sum(tl.load(ways_ptr + row[:, None] * mixtures_block + mixture[None, :], mask=is_way, other=0.0), axis=0)
    near_load = tl.sum(near, axis=0)
    change = tl.sum(even, axis=0) - near_load
    part, least = 0.0, float("inf")
    for number in tl.static_range(mixtures):
        fullest = tl.max(base + near_load + (number / (mixtures - 1)) * change, axis=0)
        cost = fullest + tl.sum(tl.where(mixture == number, ways, 0.0), axis=0) / num_ranks
        part = tl.where(cost < least, number / (mixtures - 1), part)
        least = tl.minimum(cost, least)
    tl.store(shares_ptr + place, near + part * (even - near), mask=inside)
