"""Packings for pickers that split each batch anew: as well balanced, and copies link as many GPUs as possible.

A picker can move load only between GPUs that hold copies of the same expert, and from there on to others. GPUs that such chains do not
reach keep whatever the next batch brings them. So every GPU gets the same number of copies, copies are exchanged until few groups of
GPUs are left that nothing connects, and experts with one replica make up for what that did to the balance.
"""

from __future__ import annotations

import numpy as np

from crossdock_eplb_algos._shared.arrays import Floats, Ints, layer_index, numbers
from crossdock_eplb_algos._shared.counts import greedy_counts, max_copies
from crossdock_eplb_algos._shared.packing import Packing, deal_sorted, sorted_replicas
from crossdock_eplb_algos._shared.refine import exchange_rounds, shrinking_widths

_LIFT = 4.0
"""Added to the loads of copies, in mean GPU loads. All GPUs have as many of them, so that exchanges are of like for like."""
_ROUNDS, _ROUNDS_A_WIDTH = 16, 3


def linked_packing(load: Floats, num_slots: int, num_gpus: int, *, near: float, tries: int) -> Packing:
    """A packing of ``load`` [L, E]; each expert at least once.

    Args:
        near: a layer is balanced when its fullest GPU is at most this part above its target.
        tries: exchanges of copies, the nearest in load first, that are tried to connect a group of GPUs with another.
    """
    num_layers, num_experts = load.shape
    counts = greedy_counts(load, num_slots, max_copies(num_experts, num_slots, num_gpus))
    mean = load.sum(axis=1) / num_gpus
    target = np.maximum(mean * (1 + near), (load / counts).max(axis=1))
    experts, loads, copies_a_gpu = _copies_first(load, counts, num_gpus)
    shape = (num_layers, num_gpus, num_slots // num_gpus)
    result = Packing(experts=np.empty(shape, dtype=np.int64), loads=np.empty(shape))
    for copies in np.unique(copies_a_gpu):
        layers = np.flatnonzero(copies_a_gpu == copies)
        lift = _LIFT * mean[layers] + 1.0
        packing = _dealt(experts[layers], loads[layers], num_gpus, int(copies), lift, target[layers])
        for layer in range(len(layers)):
            connect(packing.experts[layer, :, :copies], packing.loads[layer, :, :copies], tries)
        result.overwrite(layers, _rebalanced(packing, int(copies), num_experts, lift, target[layers]))
    return result


def _copies_first(load: Floats, counts: Ints, num_gpus: int) -> tuple[Ints, Floats, Ints]:
    """Replicas and their loads [L, P], those of replicated experts first, both parts heaviest first; and how many [L] of the first
    part each GPU gets. Where that does not come out even, the heaviest of the others belong to the first part."""
    experts, loads = sorted_replicas(load, counts)
    is_copy = np.take_along_axis(counts, experts, axis=1) > 1
    num_copies = is_copy.sum(axis=1)
    copies_a_gpu = -(-num_copies // num_gpus)
    is_copy |= np.cumsum(~is_copy, axis=1) <= (copies_a_gpu * num_gpus - num_copies)[:, None]
    order = np.argsort(~is_copy, axis=1, kind="stable")
    return np.take_along_axis(experts, order, axis=1), np.take_along_axis(loads, order, axis=1), copies_a_gpu


def _dealt(experts: Ints, loads: Floats, num_gpus: int, copies: int, lift: Floats, target: Floats) -> Packing:
    """Balanced, with ``copies`` copies on each GPU, which stand in its first slots."""
    lifted = loads.copy()
    lifted[:, : copies * num_gpus] += lift[:, None]
    packing = deal_sorted(experts, lifted, num_gpus)
    exchange_rounds(packing, target + copies * lift, _widths(num_gpus))
    order = np.argsort(packing.loads < lift[:, None, None], axis=2, kind="stable")
    packing = Packing(
        experts=np.take_along_axis(packing.experts, order, axis=2),
        loads=np.take_along_axis(packing.loads, order, axis=2),
    )
    packing.loads[:, :, :copies] -= lift[:, None, None]
    return packing


def _rebalanced(packing: Packing, copies: int, num_experts: int, lift: Floats, target: Floats) -> Packing:
    """Exchanges of the other replicas only: a GPU's copies count as one, which at most changes GPUs as a whole."""
    num_layers, num_gpus, _ = packing.experts.shape
    if not copies:
        return packing
    bundle = np.tile(num_experts + numbers(num_gpus), (num_layers, 1))[:, :, None]
    bundle_load = packing.loads[:, :, :copies].sum(axis=2, keepdims=True) + lift[:, None, None]
    bundled = Packing(
        experts=np.concatenate((bundle, packing.experts[:, :, copies:]), axis=2),
        loads=np.concatenate((bundle_load, packing.loads[:, :, copies:]), axis=2),
    )
    exchange_rounds(bundled, target + lift, _widths(num_gpus))
    order = np.argsort(bundled.experts < num_experts, axis=2, kind="stable")
    experts = np.take_along_axis(bundled.experts, order, axis=2)
    row, source = layer_index(num_layers), experts[:, :, 0] - num_experts
    return Packing(
        experts=np.concatenate((packing.experts[row, source, :copies], experts[:, :, 1:]), axis=2),
        loads=np.concatenate(
            (packing.loads[row, source, :copies], np.take_along_axis(bundled.loads, order, axis=2)[:, :, 1:]), axis=2
        ),
    )


def _widths(num_gpus: int) -> list[int]:
    return shrinking_widths(num_gpus, _ROUNDS, _ROUNDS_A_WIDTH)


def connect(experts: Ints, loads: Floats, tries: int) -> None:
    """Exchanges copies [G, C] of one layer, in place, so that fewer groups of GPUs are without a common expert.

    The smallest group gives a copy for one of another group, of the ``tries`` pairs nearest in load the first that connects more.
    """
    copies = experts.shape[1]
    held: list[list[int]] = experts.tolist()
    group, num_groups = linked_groups(held)
    while num_groups > 1:
        of_slot = np.repeat(group, copies)
        smallest = int(np.bincount(group)[group].argmin())
        mine, others = np.flatnonzero(of_slot == group[smallest]), np.flatnonzero(of_slot != group[smallest])
        distance = np.abs(loads.ravel()[mine][:, None] - loads.ravel()[others])
        for pair in np.argsort(distance, axis=None, kind="stable")[:tries].tolist():
            one, other = divmod(int(mine[pair // len(others)]), copies), divmod(int(others[pair % len(others)]), copies)
            if _swapped(held, one, other):
                new_group, new_number = linked_groups(held)
                if new_number < num_groups:
                    break
                _swapped(held, one, other)
        else:
            break
        group, num_groups = new_group, new_number
        loads[one], loads[other] = loads[other], loads[one]
    experts[:] = held


def _swapped(held: list[list[int]], one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Exchanges two slots' experts unless one would be twice on a GPU."""
    first, second = held[one[0]], held[other[0]]
    if first[one[1]] in second or second[other[1]] in first:
        return False
    first[one[1]], second[other[1]] = second[other[1]], first[one[1]]
    return True


def linked_groups(held: list[list[int]]) -> tuple[Ints, int]:
    """Group [G] of each GPU, GPUs with a common expert being in one group, and how many groups there are."""
    parent = list(range(len(held)))
    first_holder: dict[int, int] = {}
    num_groups = len(held)
    for gpu, experts in enumerate(held):
        for expert in experts:
            # Written out: this is called thousands of times a plan.
            mine, theirs = gpu, first_holder.setdefault(expert, gpu)
            while parent[mine] != mine:
                mine = parent[mine]
            while parent[theirs] != theirs:
                theirs = parent[theirs]
            if mine != theirs:
                parent[mine] = theirs
                num_groups -= 1
    for gpu, above in enumerate(parent):
        while parent[above] != above:
            above = parent[above]
        parent[gpu] = above
    return np.array(parent, dtype=np.int64), num_groups
