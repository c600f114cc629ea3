"""Two copies on one GPU are parted by swaps, within what a layer may move, and never for the worse."""

from __future__ import annotations

import numpy as np
from crossdock_eplb_algos._shared.packing import Packing, has_twins, packing_of
from crossdock_eplb_algos._shared.twins import part_twins, take_fresh_where_better

LOAD = np.array([[8.0, 4.0, 2.0, 6.0], [8.0, 4.0, 2.0, 6.0]])
TWINS = np.array([[0, 0, 1, 2, 3, 1], [0, 3, 1, 2, 0, 1]])
"""The first layer has both copies of expert 0 on GPU 0."""


def packing() -> Packing:
    return packing_of(TWINS, LOAD, 2)


def test_twins_are_parted_and_other_layers_stay() -> None:
    found = packing()
    layers, moves = part_twins(found, 4, None)
    assert layers.tolist() == [0]
    assert moves.tolist() == [2, 0]
    assert not has_twins(found.experts).any()
    assert np.array_equal(found.experts[1], packing().experts[1])
    assert sorted(found.experts[0].ravel().tolist()) == sorted(TWINS[0].tolist())


def test_a_layer_that_may_not_move_so_much_keeps_its_twins() -> None:
    found = packing()
    layers, moves = part_twins(found, 4, np.array([1, 9]))
    assert layers.size == 0
    assert moves.tolist() == [0, 0]
    assert np.array_equal(found.experts, packing().experts)


def test_a_layer_that_became_worse_takes_the_fresh_plan_if_that_is_not_worse_too() -> None:
    first = packing_of(np.array([[0, 0, 1, 3], [0, 0, 1, 3]]), np.array([[4.0, 3.0, 0.0, 1.0]] * 2), 2)
    worse = packing_of(np.array([[0, 1, 0, 3], [0, 1, 0, 3]]), np.array([[4.0, 3.0, 0.0, 1.0]] * 2), 2)
    assert (worse.max_load() > first.max_load()).all()
    fresh = packing_of(
        np.array([[0, 3, 0, 1], [3, 1, 3, 0]]), np.array([[4.0, 2.0, 0.0, 2.0], [5.0, 1.0, 0.0, 2.0]]), 2
    )
    for found, expected in ((fresh, [fresh, first]), (None, [first, first])):
        chosen = worse.rows(np.arange(2))
        take_fresh_where_better(chosen, first, found, np.arange(2))
        assert [chosen.experts[layer].tolist() for layer in range(2)] == [
            each.experts[layer].tolist() for layer, each in enumerate(expected)
        ]
