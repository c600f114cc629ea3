"""The manager on real ranks: experts arrive whole, ranks switch together, and failure of one rolls back on all."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np
import pytest
import torch
from crossdock.errors import InvalidPlacement, RuntimeFault
from crossdock.testing.rebalance_rig import (
    NUM_EXPERTS,
    NUM_LAYERS,
    NUM_SLOTS,
    RebalanceRig,
    RigOptions,
    SabotagedCarrier,
    shuffled_placement,
)
from crossdock.testing.world import RankContext, RankPool
from crossdock.types.placement import ExpertLoad, Placement, Topology
from crossdock.types.rebalance import RebalanceDecision, RebalanceFacts

Pool = Callable[[int], RankPool]


def rebalance_often(context: RankContext, options: RigOptions, times: int) -> list[tuple[int, ...]]:
    """Steps under load until so many rebalances ended; the maps after each."""
    rig = RebalanceRig(context, options)
    seen: list[tuple[int, ...]] = []
    while len(rig.counters.rebalances) < times:
        switched = len(rig.picker.changed)
        rig.step()
        assert rig.steps < 20_000, "rebalances do not come to an end"
        if len(rig.picker.changed) > switched or rig.steps % 16 == 0:
            rig.check_content()
        if len(rig.counters.rebalances) > len(seen):
            seen.append(tuple(rig.live.slots.flatten().tolist()))
    assert rig.outcomes() == ["applied"] * times
    return seen


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("max_step_bytes", "shared_votes"), [(40, False), (100_000, False), (100_000, True)])
@pytest.mark.parametrize("shared_slots", [False, True])
def test_experts_arrive_whole_and_all_ranks_hold_the_same_maps(
    ranks: int, max_step_bytes: int, shared_votes: bool, shared_slots: bool, rank_pool: Pool
) -> None:
    times = 2 if max_step_bytes == 40 else 4
    options = RigOptions(
        max_step_bytes=max_step_bytes, canary=True, shared_votes=shared_votes, shared_slots=shared_slots
    )
    results = rank_pool(ranks).run(rebalance_often, options, times)
    assert all(result == results[0] for result in results)
    assert results[0][-1] == tuple(shuffled_placement(times).physical_to_logical.flatten().tolist())


def switch_details(context: RankContext) -> tuple[list[int], list[tuple[int, tuple[int, ...]]], int]:
    rig = RebalanceRig(context, RigOptions(max_step_bytes=400))  # a layer in one group
    rig.manager.apply(shuffled_placement(3), "test")
    rig.run_until_idle()
    return rig.picker.changed, rig.experts.refreshed, rig.counters.rebalances[0].moved_slots


def test_a_switch_refreshes_the_slots_that_changed_and_tells_the_picker(rank_pool: Pool) -> None:
    old = np.tile(np.arange(NUM_SLOTS) % NUM_EXPERTS, (NUM_LAYERS, 1))
    changed = old != shuffled_placement(3).physical_to_logical
    for rank, (layers, refreshed, moved) in enumerate(rank_pool(2).run(switch_details)):
        assert layers == list(range(NUM_LAYERS))
        own = changed[:, rank * 6 : rank * 6 + 6]
        assert refreshed == [(layer, tuple(np.flatnonzero(own[layer]).tolist())) for layer in range(NUM_LAYERS)]
        assert moved == int(changed.sum())


def fail_once(
    context: RankContext, culprit: int, hangs: bool, shared_votes: bool = False, shared_slots: bool = False
) -> tuple[list[str], str, int, float]:
    """The second slice of one rank fails or never ends; then everything works."""

    def sabotage(carrier):  # type: ignore[no-untyped-def]
        if context.rank != culprit:
            return SabotagedCarrier(carrier)
        numbers = frozenset({1})
        return SabotagedCarrier(carrier, hangs=numbers) if hangs else SabotagedCarrier(carrier, fails=numbers)

    options = RigOptions(
        max_step_bytes=100, late_s=1.5 if hangs else 10.0, shared_votes=shared_votes, shared_slots=shared_slots
    )
    rig = RebalanceRig(context, options, sabotage=sabotage)
    while len(rig.counters.rebalances) < 2:
        rig.step()
        rig.check_content()
        assert rig.steps < 200_000, "rebalances do not come to an end"
    assert isinstance(rig.carrier, SabotagedCarrier)
    return (
        rig.outcomes(),
        rig.counters.rebalances[0].reason,
        rig.carrier.renewals,
        rig.gauges["eplb_rebalances_rolled_back"],
    )


@pytest.mark.parametrize(("shared_votes", "shared_slots"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_failed_transfer_rolls_back_on_all_ranks_and_a_later_attempt_works(
    culprit: int, shared_votes: bool, shared_slots: bool, rank_pool: Pool
) -> None:
    """Pitfalls miles#2605, tokenspeed#1373: success was reported by one side alone."""
    for outcomes, reason, renewals, counted in rank_pool(2).run(fail_once, culprit, False, shared_votes, shared_slots):
        assert outcomes == ["rolled_back", "applied"]
        assert f"rank {culprit}: experts of MoE layer row 0: ConnectionError: the cable was pulled" in reason
        assert renewals == 1
        assert counted == 1


@pytest.mark.parametrize("shared_slots", [False, True])
def test_a_rank_that_is_never_ready_is_given_up_after_a_time_and_a_later_attempt_works(
    shared_slots: bool, rank_pool: Pool
) -> None:
    """Pitfall vllm#57883: balancing stopped for ever while the server looked healthy."""
    for outcomes, reason, renewals, _ in rank_pool(2).run(fail_once, 1, True, False, shared_slots):
        assert outcomes == ["rolled_back", "applied"]
        assert "did not arrive in time" in reason
        assert renewals == 1


def many_slices_in_time(context: RankContext) -> tuple[list[str], float]:
    """A second passes at each step that stages; nothing else takes time."""
    rig = RebalanceRig(context, RigOptions(max_step_bytes=40, late_s=3.0, shared_slots=True))
    seconds = 0.0
    rig.manager.clock = lambda: seconds
    rig.manager.apply(shuffled_placement(3), "test")
    while rig.manager.is_busy:
        seconds += rig.manager.activity == "staging"
        rig.step(tokens=0)
        assert rig.steps < 20_000, "the rebalance does not end"
    return rig.outcomes(), seconds


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_of_many_slices_is_not_late_while_each_of_them_is_in_time(ranks: int, rank_pool: Pool) -> None:
    for outcomes, seconds in rank_pool(ranks).run(many_slices_in_time):
        assert outcomes == ["applied"]
        assert seconds > NUM_LAYERS * 3.0


class BrokenPlanner:
    """Fails at its first call."""

    def __init__(self) -> None:
        self.calls = 0

    def plan(self, load: ExpertLoad, topology: Topology, current: Placement | None) -> Placement:
        self.calls += 1
        if self.calls == 1:
            raise ValueError("no idea")
        return shuffled_placement(self.calls)


def plan_fails(context: RankContext) -> tuple[list[str], str]:
    rig = RebalanceRig(context, algo=BrokenPlanner())
    while len(rig.counters.rebalances) < 2:
        rig.step()
    rig.check_content()
    return rig.outcomes(), rig.counters.rebalances[0].reason


def test_a_planner_that_fails_is_reported_by_all_ranks_and_tried_again(rank_pool: Pool) -> None:
    for outcomes, reason in rank_pool(2).run(plan_fails):
        assert outcomes == ["rolled_back", "applied"]
        assert "rank 0: the planner failed: ValueError: no idea" in reason


class GreedyPlanner:
    """One expert on all spare slots: more replicas than maps of width 2 hold."""

    def plan(self, load: ExpertLoad, topology: Topology, current: Placement | None) -> Placement:
        slots = [*range(NUM_EXPERTS), *[0] * (NUM_SLOTS - NUM_EXPERTS)]
        return Placement.from_physical([slots] * NUM_LAYERS, NUM_EXPERTS)


def plan_does_not_fit(context: RankContext) -> tuple[list[str], str]:
    rig = RebalanceRig(context, algo=GreedyPlanner())
    maps = attrs.evolve(rig.maps, logical_to_physical=rig.maps.logical_to_physical[:, :, :2].contiguous())
    rig.live.maps = maps
    while not rig.counters.rebalances:
        rig.step()
    return rig.outcomes(), rig.counters.rebalances[0].reason


def test_a_plan_with_more_replicas_than_the_maps_hold_is_refused_by_all_ranks(rank_pool: Pool) -> None:
    for outcomes, reason in rank_pool(2).run(plan_does_not_fit):
        assert outcomes == ["refused"]
        assert "raise eplb.max_replicas" in reason


def two_at_once(context: RankContext) -> tuple[str, list[str], bool]:
    rig = RebalanceRig(context)
    rig.manager.apply(shuffled_placement(5), "first")
    with pytest.raises(RuntimeFault) as refused:
        rig.manager.apply(shuffled_placement(6), "second")
    rig.run_until_idle()
    rig.check_content()
    wanted = shuffled_placement(5).physical_to_logical
    return str(refused.value), rig.outcomes(), bool((rig.live.slots == wanted).all())


def test_of_two_rebalances_at_once_the_second_is_refused_with_the_state_of_the_first(rank_pool: Pool) -> None:
    for message, outcomes, is_first in rank_pool(2).run(two_at_once):
        assert "a rebalance is under way (0 of 3 layers have switched)" in message
        assert outcomes == ["applied"]
        assert is_first


def wrong_placement(context: RankContext) -> None:
    rig = RebalanceRig(context)
    with pytest.raises(InvalidPlacement, match="wanted 3, 12 and 8"):
        rig.manager.apply(Placement.from_physical([list(range(8))] * 2, 8), "too small")
    assert not rig.manager.is_busy
    rig.check_content()


def test_a_placement_of_another_size_is_refused_and_nothing_changes(rank_pool: Pool) -> None:
    rank_pool(2).run(wrong_placement)


def nothing_to_move(context: RankContext) -> tuple[list[str], int]:
    rig = RebalanceRig(context)
    rig.manager.apply(rig.live.placement(), "as it is")
    return rig.outcomes(), rig.counters.rebalances[0].moved_slots


def test_moving_to_the_placement_in_force_ends_at_once(rank_pool: Pool) -> None:
    assert rank_pool(2).run(nothing_to_move) == [(["applied"], 0)] * 2


class WritingPolicy:
    """Says no, and remembers what it was told."""

    def __init__(self) -> None:
        self.facts: list[RebalanceFacts] = []

    def choose(self, facts: RebalanceFacts) -> RebalanceDecision:
        self.facts.append(facts)
        return RebalanceDecision(rebalance=False, reason="never")


def facts_of_a_decision(context: RankContext, needs_plan: bool) -> tuple[list[RebalanceFacts], list[str]]:
    policy = WritingPolicy()
    rig = RebalanceRig(context, RigOptions(interval=5, policy_needs_plan=needs_plan), policy=policy)
    for number in range(5):
        rig.step(tokens=(1 + 2 * context.rank) * (number + 1))
    rig.run_until_idle()
    return policy.facts, rig.outcomes()


@pytest.mark.parametrize("needs_plan", [False, True])
def test_all_ranks_put_the_same_facts_to_the_policy(needs_plan: bool, rank_pool: Pool) -> None:
    first, second = rank_pool(2).run(facts_of_a_decision, needs_plan)
    assert first == second
    ((facts,), outcomes) = first
    assert facts.steps_since_last == 5
    assert facts.balancedness == pytest.approx((1 + 3) / 2 / 3)
    assert (facts.predicted_gain_s is not None) == needs_plan
    assert (facts.price_s is not None) == needs_plan
    assert outcomes == ["refused"]


def wrong_canary(context: RankContext) -> tuple[list[str], str]:
    rig = RebalanceRig(context, RigOptions(canary=True))
    if context.rank == 0:
        for canary in rig.live.canaries:
            canary.fill_(NUM_EXPERTS - 1)
    rig.manager.apply(shuffled_placement(3), "test")
    rig.run_until_idle()
    rig.check_content()
    return rig.outcomes(), rig.counters.rebalances[0].reason


def test_the_canary_finds_a_wrong_expert_before_the_layer_switches(rank_pool: Pool) -> None:
    for outcomes, reason in rank_pool(2).run(wrong_canary):
        assert outcomes == ["rolled_back"]
        assert "and got 7" in reason


def out_of_step(context: RankContext) -> None:
    rig = RebalanceRig(context)
    rig.manager.apply(shuffled_placement(3), "test")
    rig.steps += context.rank
    rig.step()


def test_ranks_at_different_passes_are_named(rank_pool: Pool) -> None:
    with pytest.raises(AssertionError, match=r"ranks \[1\] are at EPLB pass \[1\], the others at 0"):
        rank_pool(2).run(out_of_step)


def test_counts_from_before_a_switch_stay_with_their_experts(rank_pool: Pool) -> None:
    for logical in rank_pool(2).run(counts_over_a_switch):
        assert logical == [[6 * (1 + (expert < NUM_SLOTS - NUM_EXPERTS)) for expert in range(NUM_EXPERTS)]] * NUM_LAYERS


def counts_over_a_switch(context: RankContext) -> list[list[float]]:
    """One pass under the first placement, then a switch; the counters must not read the new map into the old counts."""
    rig = RebalanceRig(context, RigOptions(interval=100))
    rig.step()
    for layer in range(NUM_LAYERS):
        rig.segments.flush_layer(layer)
        rig.maps.physical_to_logical[layer].copy_(torch.from_numpy(shuffled_placement(1).physical_to_logical[layer]))
    result: list[list[float]] = rig.segments.totals(rig.manager.world).counts.sum(0).tolist()
    return result
