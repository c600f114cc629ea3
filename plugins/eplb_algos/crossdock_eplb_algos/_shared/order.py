"""Fast argsort of non-negative numbers along the last axis, with a total order: same result on every machine.

A stable argsort is slow and a plain one leaves equal values in an order that depends on the processor. Here the lowest bits of
the number's binary form give way to its index (non-negative floats sort as their bits do), the result is unique, and the
fastest sort there is will do. Values that differ by less than one part in 2 ** 36 may count as equal.
"""

from __future__ import annotations

import numpy as np

from crossdock_eplb_algos._shared.arrays import Floats, Ints, numbers


def rising(values: Floats) -> Ints:
    """Indices [..., N] from the smallest value to the largest, equal ones by index; at most 65,536 values a row."""
    keys, mask = _keys(values)
    keys |= numbers(values.shape[-1])
    keys.sort(axis=-1)
    return np.asarray(keys & mask)


def falling(values: Floats) -> Ints:
    """Indices [..., N] from the largest value to the smallest, equal ones by index."""
    keys, mask = _keys(values)
    keys |= mask - numbers(values.shape[-1])
    keys.sort(axis=-1)
    return np.asarray(mask - (keys[..., ::-1] & mask))


def _keys(values: Floats) -> tuple[Ints, int]:
    mask = (1 << max(1, (values.shape[-1] - 1).bit_length())) - 1
    # Adding zero makes a copy and turns a negative zero, whose bits sort wrongly, into zero.
    keys: Ints = (np.ascontiguousarray(values) + 0.0).view(np.int64)
    keys &= ~mask
    return keys, mask
