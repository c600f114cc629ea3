"""DeepSeek's three balancing steps, all layers at once; same results as doing one item after the other.

1. pack expert groups onto nodes; 2. replicate experts within a node; 3. pack replicas onto the node's GPUs.
The global form is the same with one group and one node.
"""

from __future__ import annotations

import numpy as np

from crossdock_eplb_algos._shared.arrays import Floats, Ints, layer_index, numbers
from crossdock_eplb_algos._shared.counts import picked_copies
from crossdock_eplb_algos._shared.order import falling


def pack_evenly(weights: Floats, num_packs: int) -> tuple[Ints, Ints]:
    """Put items [n, N], heaviest first, each into the lightest pack that has room; packs hold N / num_packs items.

    Returns the pack [n, N] of each item and its place in the pack [n, N]. One item a pack keeps the order.
    """
    num_rows, num_items = weights.shape
    room = num_items // num_packs
    if room == 1:
        return np.tile(numbers(num_items), (num_rows, 1)), np.zeros((num_rows, num_items), dtype=np.int64)
    row = layer_index(num_rows)
    order = falling(weights)
    heaviest_first = np.take_along_axis(weights, order, axis=1)
    chosen = np.empty((num_items, num_rows), dtype=np.int64)
    places = np.zeros((num_items, num_rows), dtype=np.int64)
    total = np.zeros((num_rows, num_packs))
    held = np.zeros((num_rows, num_packs), dtype=np.int64)
    start = 0
    if (heaviest_first[:, num_packs - 1] > 0).all():
        # While every item has weight, the first ones go to the empty packs in turn.
        start = num_packs
        chosen[:start] = numbers(num_packs)[:, None]
        total[:] = heaviest_first[:, :num_packs]
        held[:] = 1
    flat_total, flat_held, base = total.reshape(-1), held.reshape(-1), row[:, 0] * num_packs
    for item in range(start, num_items):
        pack = total.argmin(axis=1)
        here = base + pack
        place = flat_held[here]
        chosen[item], places[item] = pack, place
        flat_total[here] += heaviest_first[:, item]
        flat_held[here] = place + 1
        full = here[place + 1 == room]
        flat_total[full] = np.inf
    pack_of = np.empty((num_rows, num_items), dtype=np.int64)
    place_of = np.empty_like(pack_of)
    pack_of[row, order], place_of[row, order] = chosen.T, places.T
    return pack_of, place_of


def replicas_in_order(load: Floats, num_slots: int) -> tuple[Ints, Floats]:
    """Experts [n, num_slots] in number order, then the extra copies in the order they are given out; and their loads."""
    num_rows, num_experts = load.shape
    extra = picked_copies(load, num_slots - num_experts, num_slots)
    experts = np.concatenate((np.tile(numbers(num_experts), (num_rows, 1)), extra), axis=1)
    flat = (layer_index(num_rows) * num_experts + experts).ravel()
    counts = np.bincount(flat, minlength=load.size).reshape(load.shape)
    return experts, np.take_along_axis(load / counts, experts, axis=1)


def three_steps(load: Floats, num_slots: int, num_groups: int, num_nodes: int, num_gpus: int) -> Ints:
    """Slot map [L, P] of ``load`` [L, E]; the four counts divide as DeepSeek's planner needs it."""
    num_layers, num_experts = load.shape
    group_size, groups_a_node = num_experts // num_groups, num_groups // num_nodes
    row = layer_index(num_layers)
    node, place = pack_evenly(load.reshape(num_layers, num_groups, group_size).sum(axis=2), num_nodes)
    group_at = np.empty_like(node)
    group_at[row, node * groups_a_node + place] = numbers(num_groups)
    expert_at = (group_at[:, :, None] * group_size + numbers(group_size)).reshape(num_layers, num_experts)

    node_load = np.take_along_axis(load, expert_at, axis=1).reshape(num_layers * num_nodes, -1)
    local, local_load = replicas_in_order(node_load, num_slots // num_nodes)

    gpu, slot = pack_evenly(local_load, num_gpus // num_nodes)
    slots = np.empty_like(local)
    slots[layer_index(len(local)), gpu * (num_slots // num_gpus) + slot] = local
    first = np.tile(numbers(num_nodes) * (num_experts // num_nodes), num_layers)[:, None]
    return np.take_along_axis(expert_at, (slots + first).reshape(num_layers, -1), axis=1)
