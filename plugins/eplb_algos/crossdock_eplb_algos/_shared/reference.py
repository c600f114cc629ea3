"""The reference's plan, without its one fault: two copies of an expert on a GPU while another GPU could take one."""

from __future__ import annotations

import numpy as np

from crossdock_eplb_algos._shared.arrays import Floats, Ints, layer_index
from crossdock_eplb_algos._shared.balance import EFFORTS, balanced_packing
from crossdock_eplb_algos._shared.counts import max_copies
from crossdock_eplb_algos._shared.packing import Packing, has_twins, packing_of, separate_copies
from crossdock_eplb_algos._shared.refine import exchange_rounds, shrinking_widths
from crossdock_eplb_algos._shared.steps import three_steps

_ROUNDS = 32


def reference_map(load: Floats, num_slots: int, num_groups: int, num_nodes: int, num_gpus: int) -> Ints:
    """Slot map [L, P] of DeepSeek's three steps; layers with twins are planned again, at least as well balanced.

    That happens inside a node, so groups stay where they are.
    """
    slots = three_steps(load, num_slots, num_groups, num_nodes, num_gpus)
    slots_a_gpu = num_slots // num_gpus
    if slots_a_gpu == 1:
        return slots
    by_gpu = slots.reshape(len(slots) * num_nodes, num_gpus // num_nodes, slots_a_gpu)
    rows = np.flatnonzero(has_twins(by_gpu).any(axis=1))
    if rows.size:
        everywhere = packing_of(slots, load, num_gpus)
        packing = Packing(experts=by_gpu[rows], loads=everywhere.loads.reshape(by_gpu.shape)[rows])
        _part_twins(packing, load[rows // num_nodes], load.shape[1] // num_nodes)
        by_gpu[rows] = packing.experts
    return slots


def _part_twins(packing: Packing, load: Floats, num_local: int) -> None:
    """Free rows of twins, in place; each row is one node of one layer with ``num_local`` experts, ``load`` [n, E] the layer's.

    Swaps and exchanges do where counts allow them; rows that they leave fuller than before, or in which an expert has more
    copies than there are GPUs, are planned from their loads.
    """
    _, num_gpus, slots_a_gpu = packing.experts.shape
    num_rows, num_slots = len(load), num_gpus * slots_a_gpu
    before = packing.max_load()
    line = layer_index(num_rows)
    copies = np.zeros(load.shape, dtype=np.int64)
    np.add.at(copies, (line, packing.experts.reshape(num_rows, num_slots)), 1)
    crowded = copies.max(axis=1) > min(num_gpus, max_copies(num_local, num_slots, num_gpus))
    separate_copies(packing, np.flatnonzero(~crowded))
    exchange_rounds(packing, before, shrinking_widths(num_gpus, _ROUNDS, 2))
    for effort in ("fast", "default"):
        again = np.flatnonzero(crowded | (packing.max_load() > before * (1 + 1e-12)))
        if not again.size:
            return
        local = np.nonzero(copies[again])[1].reshape(again.size, num_local)
        found = balanced_packing(load[again[:, None], local], num_slots, num_gpus, EFFORTS[effort])
        better = crowded[again] | (found.max_load() < packing.rows(again).max_load())
        found.experts = np.take_along_axis(local, found.experts.reshape(again.size, num_slots), axis=1).reshape(
            found.experts.shape
        )
        packing.overwrite(again[better], found.rows(np.flatnonzero(better)))
        crowded[:] = False
