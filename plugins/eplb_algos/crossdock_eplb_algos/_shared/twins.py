"""Two copies of an expert on one GPU: they share nothing, so one of them is a wasted slot. Plans of ours have none; placements of others may."""

from __future__ import annotations

import numpy as np

from crossdock_eplb_algos._shared.arrays import Ints
from crossdock_eplb_algos._shared.packing import Packing, has_twins, separate_copies
from crossdock_eplb_algos._shared.slots import moved_replicas


def part_twins(packing: Packing, num_experts: int, limit: Ints | None) -> tuple[Ints, Ints]:
    """Swap second copies to GPUs that have none, in place.

    Args:
        packing: G GPUs of S slots; not more slots than a copy of each expert on each GPU takes.
        limit: [L] most moves of a layer; one that needs more is left as it is. None: any number.

    Returns:
        The layers [n] that were changed, and the moves [L] that it took.
    """
    old = packing.experts.copy()
    layers = np.flatnonzero(has_twins(packing.experts).any(axis=1))
    before = packing.rows(layers)
    separate_copies(packing, layers)
    moves = moved_replicas(old, packing.experts, num_experts)
    if limit is not None:
        dear = moves[layers] > limit[layers]
        packing.overwrite(layers[dear], before.rows(np.flatnonzero(dear)))
        moves[layers[dear]] = 0
        layers = layers[~dear]
    return layers, moves


def take_fresh_where_better(packing: Packing, first: Packing, fresh: Packing | None, layers: Ints) -> None:
    """Of ``layers`` [n] those that still have twins, or whose fullest GPU is fuller than in ``first``, take ``fresh``; where that is fuller
    too, or None, the fuller ones go back to ``first``. In place."""
    peak, found = first.max_load()[layers] * (1 + 1e-9), packing.max_load()[layers]
    worse = layers[found > peak]
    packing.overwrite(worse, first.rows(worse))
    if fresh is not None:
        has_some = has_twins(packing.experts[layers]).any(axis=1)
        better = layers[has_some & (fresh.max_load()[layers] <= peak)]
        packing.overwrite(better, fresh.rows(better))
