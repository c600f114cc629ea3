"""What is special about allgatherv: nothing moves, ids become local, sums stay owed."""

from __future__ import annotations

import pytest
import torch
from crossdock.groups import resolve_sizes
from crossdock.testing.dispatch_flights import build_dispatcher
from crossdock.testing.dispatch_scenarios import HIDDEN_SIZE, DispatchScenario
from crossdock.testing.world import OneProcessWorld, RankContext
from crossdock.types.dispatch import DispatchStep
from crossdock.types.layout import FULL_ROWS, Owed, SumAxis
from crossdock.types.parallel import ParallelSizes
from crossdock_dispatchers.allgatherv.capabilities import allgatherv_capabilities

IDS = torch.tensor([[0, 5, -1], [3, 2, 4]])


def local_ids(context: RankContext, sizes: ParallelSizes) -> tuple[list[list[int]], bool]:
    """Local ids of this rank, and whether the rows are the tensor that was handed in."""
    scenario = DispatchScenario(
        sizes=sizes, live_tokens=(2,) * sizes.attn_dp_size, experts_a_rank=6 // sizes.moe_ep_size
    )
    dispatcher = build_dispatcher(context, "allgatherv", {}, scenario)
    rows = torch.ones(2, HIDDEN_SIZE)
    received = dispatcher.dispatch_end(dispatcher.dispatch_begin(rows, IDS, torch.ones(2, 3), DispatchStep(), 0))
    assert received.local_topk_ids is not None
    ids: list[list[int]] = received.local_topk_ids.tolist()
    return ids, received.rows is rows


def test_ids_of_other_ranks_become_minus_one() -> None:
    sizes = resolve_sizes(ranks=2, attn_dp_size=2)
    first, second = OneProcessWorld(sizes).run(local_ids, sizes)
    assert first == ([[0, -1, -1], [-1, 2, -1]], True)
    assert second == ([[-1, 2, -1], [0, -1, 1]], True)


def test_ranks_that_share_the_intermediate_size_hold_the_same_experts() -> None:
    sizes = resolve_sizes(ranks=2, attn_dp_size=2, moe_ep_size=1, moe_tp_size=2)
    assert [ids for ids, _ in OneProcessWorld(sizes).run(local_ids, sizes)] == [IDS.tolist()] * 2


@pytest.mark.parametrize(
    ("moe_ep", "moe_tp", "owed"),
    [
        (4, 1, {SumAxis.MOE_EP}),
        (1, 4, {SumAxis.MOE_TP}),
        (2, 2, {SumAxis.MOE_EP, SumAxis.MOE_TP}),
    ],
)
def test_the_sum_over_all_ranks_with_experts_stays_owed(moe_ep: int, moe_tp: int, owed: Owed) -> None:
    capabilities = allgatherv_capabilities(
        resolve_sizes(ranks=4, attn_dp_size=2, moe_ep_size=moe_ep, moe_tp_size=moe_tp)
    )
    assert capabilities.output_owed == owed
    assert capabilities.input_rows == capabilities.output_rows == FULL_ROWS
    assert capabilities.rank_invariant_picks_needed == (moe_ep > 1)


def test_one_rank_owes_nothing() -> None:
    assert not allgatherv_capabilities(resolve_sizes(ranks=1)).output_owed
