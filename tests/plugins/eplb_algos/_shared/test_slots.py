"""Keeping in place what is in place."""

from __future__ import annotations

import numpy as np
from crossdock_eplb_algos._shared.slots import (
    keep_slots,
    moved_replicas,
    relabel_gpus,
    single_slot_map,
    trivial_map,
    with_missing_experts,
)


def test_experts_that_stay_on_their_gpu_stay_in_their_slot() -> None:
    old = np.array([[[3, 1, 2], [0, 1, 4]]])
    new = np.array([[[2, 5, 3], [4, 0, 1]]])
    assert keep_slots(old, new).tolist() == [[[3, 5, 2], [0, 1, 4]]]


def test_renaming_gpus_undoes_a_permutation_of_them() -> None:
    rng = np.random.default_rng(0)
    old = np.stack([rng.permutation(24).reshape(6, 4) for _ in range(3)])
    order = np.stack([rng.permutation(6) for _ in range(3)])
    new = np.take_along_axis(old, order[:, :, None], axis=1)
    chosen = relabel_gpus(old, new, 24)
    back = np.take_along_axis(new, chosen[:, :, None], axis=1)
    assert moved_replicas(old, back, 24).tolist() == [0, 0, 0]


def test_one_slot_a_gpu_keeps_the_order_and_changes_only_what_counts_ask_for() -> None:
    old = trivial_map(1, 4, 6)
    counts = np.array([[1, 1, 1, 3]])
    slots = single_slot_map(counts, old)
    assert (slots != old).sum() == 2
    assert np.bincount(slots[0], minlength=4).tolist() == [1, 1, 1, 3]


def test_a_missing_expert_takes_a_slot_of_the_donor_that_suffers_least() -> None:
    slots, rewritten = with_missing_experts(np.array([[0, 0, 1, 1, 2]]), np.array([[9.0, 2.0, 5.0, 1.0]]))
    assert slots.tolist() == [[0, 0, 1, 3, 2]]
    assert rewritten.tolist() == [1]
