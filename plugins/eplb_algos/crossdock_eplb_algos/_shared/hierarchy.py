"""Groups at home on a node, with the hottest replicas allowed to cross.

Whole groups on nodes cannot be balanced well: at 8 groups on 4 nodes even the best split leaves 13 points. Here each expert
has its first replica on its group's node; further copies go to whichever node has least load, and then replicas are swapped
between nodes. The number of slots that hold an expert of another node's group stays within a limit.
"""

from __future__ import annotations

import attrs
import numpy as np
from crossdock.types.placement import Topology

from crossdock_eplb_algos._shared.arrays import Bools, Floats, Ints, layer_index, numbers
from crossdock_eplb_algos._shared.balance import Effort
from crossdock_eplb_algos._shared.counts import picked_copies
from crossdock_eplb_algos._shared.packing import Packing, deal_sorted
from crossdock_eplb_algos._shared.refine import exchange_rounds, shrinking_widths
from crossdock_eplb_algos._shared.steps import pack_evenly

_NODE_ROUNDS = 48
_NODE_NEAR = 2e-3
_LEAST_GAIN = 1e-6


@attrs.frozen(kw_only=True)
class Nodes:
    """Sizes of a hierarchical placement; groups and GPUs divide over nodes."""

    num_groups: int
    num_nodes: int
    num_gpus: int
    num_slots: int
    max_outside: int
    """Slots a layer that may hold an expert whose group lives on another node."""


def home_nodes(load: Floats, nodes: Nodes) -> Ints:
    """[L, E] node of each expert's group: groups packed evenly by load, heaviest first."""
    num_layers, num_experts = load.shape
    group_load = load.reshape(num_layers, nodes.num_groups, -1).sum(axis=2)
    return np.repeat(pack_evenly(group_load, nodes.num_nodes)[0], num_experts // nodes.num_groups, axis=1)


def slots_outside(slots: Ints, nodes: Nodes, num_experts: int) -> Ints:
    """[L] slots of a slot map [L, P] that hold an expert of a group that is at home on another node.

    Homes are read off the map: the group and the node that have most slots together first, until nodes have their groups.
    """
    num_layers, num_slots = slots.shape
    group = slots // (num_experts // nodes.num_groups)
    node = numbers(num_slots) // (num_slots // nodes.num_nodes)
    together = np.zeros((num_layers, nodes.num_groups, nodes.num_nodes), dtype=np.int64)
    np.add.at(together, (layer_index(num_layers), group, node), 1)
    room = np.full((num_layers, nodes.num_nodes), nodes.num_groups // nodes.num_nodes)
    layer, outside = numbers(num_layers), np.full(num_layers, num_slots)
    for _ in range(nodes.num_groups):
        best = together.reshape(num_layers, -1).argmax(axis=1)
        of_group, of_node = np.divmod(best, nodes.num_nodes)
        outside -= together[layer, of_group, of_node]
        room[layer, of_node] -= 1
        together[layer, of_group] = -1
        full = np.flatnonzero(room[layer, of_node] == 0)
        together[full, :, of_node[full]] = -1
    return outside


def escaping_packing(load: Floats, nodes: Nodes, effort: Effort) -> Packing:
    """A packing of ``load`` [L, E] with at most ``nodes.max_outside`` slots a layer outside their group's node."""
    home = home_nodes(load, nodes)
    experts, values, at_node = _spread_copies(load, home, nodes)
    _swap_between_nodes(experts, values, at_node, home, nodes)
    # Inside a node the planner for flat placements does the rest: every (layer, node) is a row of its own.
    row = layer_index(len(load))
    order = np.lexsort((experts, -values, at_node), axis=1)
    rows, slots_a_node = len(load) * nodes.num_nodes, nodes.num_slots // nodes.num_nodes
    node_experts = experts[row, order].reshape(rows, slots_a_node)
    node_values = values[row, order].reshape(rows, slots_a_node)
    gpus_a_node = nodes.num_gpus // nodes.num_nodes
    packing = deal_sorted(node_experts, node_values, gpus_a_node)
    mean = node_values.sum(axis=1) / gpus_a_node
    widths = shrinking_widths(gpus_a_node, max(effort.rounds, 2), max(effort.rounds_a_width, 1))
    exchange_rounds(packing, np.maximum(mean, node_values[:, 0]) * (1 + effort.near), widths)
    shape = (len(load), nodes.num_gpus, -1)
    return Packing(experts=packing.experts.reshape(shape), loads=packing.loads.reshape(shape))


def _spread_copies(load: Floats, home: Ints, nodes: Nodes) -> tuple[Ints, Floats, Ints]:
    """Experts, loads and nodes of all replicas, [L, P] each: first ones at home, each copy on the lightest node with room.

    Where the limit leaves no node for a copy, the lightest node with room takes one of its own hottest expert instead.
    """
    num_layers, num_experts = load.shape
    gpus_a_node = nodes.num_gpus // nodes.num_nodes
    copies = picked_copies(load, nodes.num_slots - num_experts, nodes.num_gpus)
    row, layer = layer_index(num_layers), numbers(num_layers)
    planned = np.ones((num_layers, num_experts), dtype=np.int64)
    np.add.at(planned, (row, copies), 1)
    per_copy = load / planned
    held = np.zeros((num_layers, num_experts, nodes.num_nodes), dtype=np.int64)
    held[row, numbers(num_experts), home] = 1
    total = np.zeros((num_layers, nodes.num_nodes))
    np.add.at(total, (row, home), per_copy)
    room = np.full((num_layers, nodes.num_nodes), (nodes.num_slots - num_experts) // nodes.num_nodes)
    outside = np.zeros(num_layers, dtype=np.int64)
    at_node = np.concatenate((home, np.zeros_like(copies)), axis=1)
    for turn in range(copies.shape[1]):
        expert = copies[:, turn]
        abroad = numbers(nodes.num_nodes) != home[layer, expert][:, None]
        closed = (room < 1) | (held[layer, expert] >= gpus_a_node) | (abroad & (outside >= nodes.max_outside)[:, None])
        node = np.where(closed, np.inf, total).argmin(axis=1)
        none = np.flatnonzero(closed.all(axis=1))
        if none.size:
            node[none] = np.where(room[none] < 1, np.inf, total[none]).argmin(axis=1)
            fits = (home[none] == node[none, None]) & (held[none, :, node[none]] < gpus_a_node)
            hottest = np.where(fits, load[none] / held[none].sum(axis=2), -1.0).argmax(axis=1)
            expert[none] = hottest
        at_node[:, num_experts + turn] = node
        held[layer, expert, node] += 1
        total[layer, node] += per_copy[layer, expert]
        room[layer, node] -= 1
        outside += home[layer, expert] != node
    experts = np.concatenate((np.tile(numbers(num_experts), (num_layers, 1)), copies), axis=1)
    return experts, (load / held.sum(axis=2))[row, experts], at_node


def _swap_between_nodes(experts: Ints, values: Floats, at_node: Ints, home: Ints, nodes: Nodes) -> None:
    """Swap replicas of the fullest and the emptiest node, in place in ``at_node`` [L, P], while that evens them out."""
    num_nodes, gpus_a_node = nodes.num_nodes, nodes.num_gpus // nodes.num_nodes
    layers = numbers(len(experts))
    is_home = np.take_along_axis(home, experts, axis=1)
    for _ in range(_NODE_ROUNDS):
        total = np.stack(
            [(values[layers] * (at_node[layers] == node)).sum(axis=1) for node in range(num_nodes)], axis=1
        )
        uneven = total.max(axis=1) > total.mean(axis=1) * (1 + _NODE_NEAR)
        layers, total = layers[uneven], total[uneven]
        if not layers.size:
            return
        done = _swap_once((experts, values, at_node, is_home), layers, total, gpus_a_node, nodes.max_outside)
        layers = layers[done]


def _swap_once(
    replicas: tuple[Ints, Floats, Ints, Ints], layers: Ints, total: Floats, gpus_a_node: int, max_outside: int
) -> Bools:
    """One swap in each of ``layers`` [n]; which had one [n]. ``replicas``: experts, loads, nodes (changed) and home nodes."""
    experts, values, at_node, is_home = replicas
    row = numbers(layers.size)
    heavy, light = total.argmax(axis=1), total.argmin(axis=1)
    where, homes = at_node[layers], is_home[layers]
    slots = where.shape[1] // total.shape[1]
    mine = np.nonzero(where == heavy[:, None])[1].reshape(layers.size, slots)
    theirs = np.nonzero(where == light[:, None])[1].reshape(layers.size, slots)
    line = row[:, None]
    half_gap = (total[row, heavy] - total[row, light]) / 2
    distance = np.abs(
        (values[layers[:, None], mine] - half_gap[:, None])[:, :, None] - values[layers[:, None], theirs][:, None, :]
    )
    # Slots outside their home node before and after, of the two replicas that change places.
    goes = (homes[line, mine] != light[:, None]).astype(np.int64) - (homes[line, mine] != heavy[:, None])
    comes = (homes[line, theirs] != heavy[:, None]).astype(np.int64) - (homes[line, theirs] != light[:, None])
    outside = (where != homes).sum(axis=1)
    change = goes[:, :, None] + comes[:, None, :]
    barred = outside[:, None, None] + change > max_outside
    held = experts[layers]
    for side, other, own in ((mine, light, 0), (theirs, heavy, 1)):
        there = ((held[line, side][:, :, None] == held[:, None, :]) & (where[:, None, :] == other[:, None, None])).sum(
            axis=2
        )
        full = there >= gpus_a_node
        barred |= full[:, :, None] if own == 0 else full[:, None, :]
    distance[barred] = np.inf
    best = distance.reshape(layers.size, -1).argmin(axis=1)
    a, b = np.divmod(best, slots)
    good = distance[row, a, b] < half_gap * (1 - _LEAST_GAIN)
    chosen, a, b = np.flatnonzero(good), a[good], b[good]
    at_node[layers[chosen], mine[chosen, a]] = light[chosen]
    at_node[layers[chosen], theirs[chosen, b]] = heavy[chosen]
    return np.asarray(good)


def exceeds_copies(num_experts: int, topology: Topology) -> str:
    """Why copies cannot be dealt to nodes one by one, as a note; empty when they can: no GPU must hold two of one expert."""
    most = num_experts * topology.num_gpus
    if topology.num_physical_experts <= most:
        return ""
    return (
        f"planned flat, over all GPUs alike: {topology.num_physical_experts} slots are more than a copy of each of"
        f" {num_experts} experts on each of {topology.num_gpus} GPUs takes ({most})"
    )


def broken_rules(num_experts: int, topology: Topology) -> str:
    """Why groups cannot be kept on nodes here, as a note; empty when they can."""
    broken = [
        f"{name} ({count} % {divisor})"
        for name, count, divisor in (
            ("experts divide over groups", num_experts, topology.num_groups),
            ("groups divide over nodes", topology.num_groups, topology.num_nodes),
            ("GPUs divide over nodes", topology.num_gpus, topology.num_nodes),
        )
        if count % divisor
    ]
    if not broken:
        return ""
    return (
        "planned flat, over all GPUs alike: keeping groups on nodes needs that experts divide over groups, groups over"
        f" nodes and GPUs over nodes; not so here: {', '.join(broken)}"
    )
