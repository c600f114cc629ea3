"""What a step may copy and send, and what one rank does in a layer's move."""

from __future__ import annotations

import pytest
from crossdock.eplb.layer_plan import HOST_STEP_BYTES, MoveBudget, plan_layer
from crossdock.types.placement import Topology

MIB = 1 << 20


@pytest.mark.parametrize(
    ("max_step_bytes", "is_on_host", "sent", "copied"),
    [
        (16 * MIB, False, 16 * MIB, 64 * MIB),
        (MIB, True, MIB, 2 * MIB),
        (3 * MIB, True, 3 * MIB, HOST_STEP_BYTES),
        (16 * MIB, True, HOST_STEP_BYTES, HOST_STEP_BYTES),
    ],
)
def test_a_step_thread_that_copies_itself_copies_little(
    max_step_bytes: int, is_on_host: bool, sent: int, copied: int
) -> None:
    budget = MoveBudget.of(slot_bytes=1, max_step_bytes=max_step_bytes, max_replicas=2, is_on_host=is_on_host)
    assert (budget.max_bytes, budget.max_copy_bytes) == (sent, copied)


@pytest.mark.parametrize(("max_copy_bytes", "groups"), [(10, 4), (99, 4), (200, 2), (4000, 1)])
def test_a_group_holds_the_slots_that_its_bytes_allow_and_one_at_least(max_copy_bytes: int, groups: int) -> None:
    topology = Topology(num_gpus=2, num_nodes=1, num_physical_experts=8)
    budget = MoveBudget(slot_bytes=100, max_bytes=100, max_copy_bytes=max_copy_bytes, max_replicas=5)
    # Rank 1 gives up its copies of experts 0 to 3, each of which rank 0 holds too.
    plan = plan_layer(0, [0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 1, 2, 3, 0], topology, budget, 1)
    assert len(plan.groups) == groups
    assert sorted(slot for group in plan.groups for slot in group) == [4, 5, 6, 7]


def test_a_rank_takes_part_in_the_slices_that_concern_it() -> None:
    topology = Topology(num_gpus=3, num_nodes=1, num_physical_experts=6)
    budget = MoveBudget(slot_bytes=10, max_bytes=10, max_copy_bytes=10, max_replicas=3)
    old, new = [0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 2, 3]
    own = [plan_layer(0, old, new, topology, budget, rank) for rank in range(3)]
    assert [len(plan.slices) for plan in own] == [0, 2, 2]
    assert [plan.new_experts for plan in own] == [{}, {}, {0: 2, 1: 3}]
    assert len({plan.groups for plan in own}) == 1
