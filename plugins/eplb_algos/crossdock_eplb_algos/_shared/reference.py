"""The reference's plan, without its one fault: two copies of an expert on a GPU while another GPU could take one."""

from __future__ import annotations

import numpy as np

from crossdock_eplb_algos._shared.arrays import Floats, Ints, numbers
from crossdock_eplb_algos._shared.packing import has_twins, packing_of, separate_copies
from crossdock_eplb_algos._shared.refine import exchange_rounds, shrinking_widths
from crossdock_eplb_algos._shared.steps import three_steps

_ROUNDS = 32


def reference_map(load: Floats, num_slots: int, num_groups: int, num_nodes: int, num_gpus: int) -> Ints:
    """Slot map [L, P] of DeepSeek's three steps; layers with twins are parted and balanced at least as well again."""
    slots = three_steps(load, num_slots, num_groups, num_nodes, num_gpus)
    gpus_a_node, slots_a_gpu = num_gpus // num_nodes, num_slots // num_gpus
    if slots_a_gpu == 1:
        return slots
    layers = np.flatnonzero(has_twins(slots.reshape(len(slots), num_gpus, -1)).any(axis=1))
    if not layers.size:
        return slots
    # Inside a node only, so that groups stay where they are: each (layer, node) is a row.
    packing = packing_of(slots[layers], load[layers], num_gpus)
    packing.experts = packing.experts.reshape(-1, gpus_a_node, slots_a_gpu)
    packing.loads = packing.loads.reshape(-1, gpus_a_node, slots_a_gpu)
    before = packing.max_load()
    separate_copies(packing, numbers(len(packing.experts)))
    exchange_rounds(packing, before, shrinking_widths(gpus_a_node, _ROUNDS, 2))
    slots[layers] = packing.experts.reshape(layers.size, -1)
    return slots
