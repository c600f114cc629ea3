"""Packings for pickers that split each batch anew: as well balanced, and copies link as many GPUs as possible.

A picker can move load only between GPUs that hold copies of the same expert, and from there on to others. GPUs that such chains do not
reach keep whatever the next batch brings them. So every GPU gets the same number of copies, copies are exchanged until few groups of
GPUs are left that nothing connects, and experts with one replica make up for what that did to the balance.
"""

from __future__ import annotations

import attrs
import numpy as np

from crossdock_eplb_algos._shared.arrays import Bools, Floats, Ints, layer_index, numbers
from crossdock_eplb_algos._shared.counts import greedy_counts, max_copies
from crossdock_eplb_algos._shared.packing import Packing, deal_sorted, replica_counts, sorted_replicas
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
        movable = np.zeros(shape[1:], dtype=np.bool_)
        movable[:, :copies] = True
        for layer in range(len(layers)):
            _Links(experts=packing.experts[layer], loads=packing.loads[layer], movable=movable).connect(tries)
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


def relink(packing: Packing, ceiling: Floats, most_exchanges: Ints, tries: int) -> None:
    """Connects GPUs of packings that are in force, in place: exchanges of copies that leave GPUs at or below ``ceiling`` [L].

    ``most_exchanges`` [L]: each of them loads two replicas.
    """
    num_layers, num_gpus, slots_a_gpu = packing.experts.shape
    by_layer = packing.experts.reshape(num_layers, -1)
    counts = replica_counts(by_layer, int(by_layer.max()) + 1)
    movable = (np.take_along_axis(counts, by_layer, axis=1) > 1).reshape(num_layers, num_gpus, slots_a_gpu)
    # A GPU without a copy gives whatever it has for one.
    movable |= ~movable.any(axis=2, keepdims=True)
    for layer in range(num_layers):
        links = _Links(experts=packing.experts[layer], loads=packing.loads[layer], movable=movable[layer])
        links.connect(tries, ceiling=float(ceiling[layer]), most_exchanges=int(most_exchanges[layer]))


@attrs.define(kw_only=True)
class _Links:
    """One layer whose copies change GPUs. Arrays are changed in place."""

    experts: Ints
    """[G, S]."""
    loads: Floats
    """[G, S]."""
    movable: Bools
    """[G, S] slots that may be exchanged."""

    def connect(self, tries: int, *, ceiling: float = np.inf, most_exchanges: int = 1 << 30) -> None:
        """Exchanges until one group of GPUs is left or none of ``tries`` exchanges helps.

        The smallest group gives a copy for one of another group: of the pairs nearest in load the first that connects more.
        """
        gpu, slot = np.nonzero(self.movable)
        load, total = self.loads[gpu, slot], self.loads.sum(axis=1)
        held: list[list[int]] = [row[mask].tolist() for row, mask in zip(self.experts, self.movable, strict=True)]
        place = numbers(len(gpu)) - np.searchsorted(gpu, gpu)
        group, num_groups = linked_groups(held)
        for _ in range(most_exchanges):
            of_copy = group[gpu]
            sizes = np.bincount(group, minlength=len(group))
            has_copies = np.bincount(of_copy, minlength=len(group)) > 0
            smallest = int(np.where((sizes > 0) & has_copies, sizes, len(group) + 1).argmin())
            mine, others = np.flatnonzero(of_copy == smallest), np.flatnonzero(of_copy != smallest)
            if num_groups == 1 or not mine.size or not others.size:
                break
            gap = load[mine][:, None] - load[others]
            fits = (total[gpu[mine]][:, None] - gap <= ceiling) & (total[gpu[others]] + gap <= ceiling)
            distance = np.where(fits, np.abs(gap), np.inf).ravel()
            for pair in np.argsort(distance, kind="stable")[: min(tries, int(fits.sum()))].tolist():
                one, other = int(mine[pair // len(others)]), int(others[pair % len(others)])
                spots = (gpu[one], place[one]), (gpu[other], place[other])
                if _swapped(held, *spots):
                    new_group, new_number = linked_groups(held)
                    if new_number < num_groups:
                        break
                    _swapped(held, *spots)
            else:
                break
            group, num_groups = new_group, new_number
            total[gpu[one]] += load[other] - load[one]
            total[gpu[other]] += load[one] - load[other]
            load[one], load[other] = load[other], load[one]
        self.experts[gpu, slot] = [expert for row in held for expert in row]
        self.loads[gpu, slot] = load


def _swapped(held: list[list[int]], one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Exchanges two copies unless an expert would be twice on a GPU."""
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
