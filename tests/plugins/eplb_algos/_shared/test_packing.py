"""First deals, and parting copies of an expert."""

from __future__ import annotations

import numpy as np
import pytest
from crossdock.testing.expert_loads import LOADS
from crossdock_eplb_algos._shared.counts import greedy_counts, max_copies
from crossdock_eplb_algos._shared.packing import Packing, deal, has_twins, packing_of, separate_copies


@pytest.mark.parametrize("kind", sorted(LOADS))
@pytest.mark.parametrize(("num_experts", "num_slots", "num_gpus"), [(32, 40, 8), (8, 16, 8), (4, 24, 6), (3, 12, 2)])
def test_a_deal_places_every_replica_and_keeps_copies_apart_where_it_can(
    kind: str, num_experts: int, num_slots: int, num_gpus: int
) -> None:
    load = LOADS[kind]((1, 6, num_experts), 1)[0]
    counts = greedy_counts(load, num_slots, max_copies(num_experts, num_slots, num_gpus))
    packing = deal(load, counts, num_gpus)
    for layer, row in enumerate(packing.experts):
        assert np.bincount(row.ravel(), minlength=num_experts).tolist() == counts[layer].tolist()
    if counts.max() <= num_gpus:
        assert not has_twins(packing.experts).any()
    again = packing_of(packing.experts.reshape(6, -1), load, num_gpus)
    np.testing.assert_allclose(again.loads, packing.loads)


def test_copies_that_no_swap_can_part_are_dealt_anew() -> None:
    """Two GPUs with one expert each in all slots: every swap would make twins elsewhere."""
    experts = np.array([[[0, 0], [1, 1]]])
    packing = Packing(experts=experts.copy(), loads=np.ones((1, 2, 2)))
    separate_copies(packing, np.array([0]))
    assert not has_twins(packing.experts).any()
