"""What makes the arrays of a placement a placement; each check raises ``InvalidPlacement``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from crossdock.errors import InvalidPlacement

Ints = npt.NDArray[np.int64]


def check_slots(slots: Ints, num_logical_experts: int) -> None:
    """A slot map [L, P] that is not empty and holds experts that there are."""
    if slots.ndim != 2 or not slots.size:
        raise InvalidPlacement(f"a slot map must be [layers, slots] and not empty, found shape {list(slots.shape)}")
    if slots.min() < 0 or slots.max() >= num_logical_experts:
        wrong = (slots < 0) | (slots >= num_logical_experts)
        layer, slot = (int(axis[0]) for axis in np.nonzero(wrong))
        raise InvalidPlacement(
            f"layer {layer}, slot {slot} holds {slots[layer, slot]}: logical experts are 0 to {num_logical_experts - 1}"
        )


def check_replicas(counts: Ints) -> None:
    """Every expert [L, E] has a replica."""
    if counts.min(initial=1) < 1:
        layer, expert = (int(axis[0]) for axis in np.nonzero(counts < 1))
        raise InvalidPlacement(f"layer {layer}: logical expert {expert} has no replica")


def check_lists(slots: Ints, lists: Ints, counts: Ints) -> None:
    """Every listed slot holds its expert, lists are in slot order with -1 behind, and counts are their lengths."""
    layer = np.repeat(np.arange(len(counts), dtype=np.int64), counts.sum(axis=1))
    expert = np.repeat(np.tile(np.arange(counts.shape[1], dtype=np.int64), len(counts)), counts.ravel())
    place = np.arange(layer.size, dtype=np.int64) - np.repeat(np.cumsum(counts) - counts.ravel(), counts.ravel())
    slot = lists[layer, expert, place]
    in_range = bool(((slot >= 0) & (slot < slots.shape[1])).all())
    if not in_range or int(np.count_nonzero(lists >= 0)) != slot.size:
        raise InvalidPlacement("replica counts are not the lengths of the replica lists (padding is -1, at the end)")
    wrong = slots[layer, slot] != expert
    if wrong.any():
        first = int(wrong.argmax())
        raise InvalidPlacement(
            f"layer {layer[first]}: slot {slot[first]} is listed for logical expert {expert[first]} but holds"
            f" {slots[layer[first], slot[first]]}"
        )
    if ((slot[1:] <= slot[:-1]) & (place[1:] > 0)).any():
        raise InvalidPlacement("replica lists must be in slot order, each slot once")
