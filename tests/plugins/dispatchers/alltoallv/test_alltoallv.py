"""What is special about alltoallv: rows travel once a rank, both forms agree to the bit, one message a direction."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
import torch
from crossdock.groups import resolve_sizes
from crossdock.testing.dispatch_flights import build_dispatcher
from crossdock.testing.dispatch_scenarios import DispatchScenario, held_range, routed_rows
from crossdock.testing.world import OneProcessWorld, RankContext, RankPool
from crossdock.types.dispatch import DispatchStep
from crossdock.types.parallel import ParallelSizes
from crossdock_dispatchers.alltoallv.wire import WireFormat

SIZES = resolve_sizes(ranks=4, attn_dp_size=4)
SCENARIO = DispatchScenario(sizes=SIZES, live_tokens=(5, 0, 9, 1), routing="holes")


def combined(
    context: RankContext, scenario: DispatchScenario, one_round_bytes: int
) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Combined rows of this rank, rows that arrived, and (row, expert) pairs in them; experts multiply by their number."""
    dispatcher = build_dispatcher(context, "alltoallv", {"one_round_bytes": one_round_bytes}, scenario)
    layout = dispatcher.capabilities.input_rows
    rows = routed_rows(scenario).held(layout, scenario, context.rank)
    counts = tuple(held_range(layout, scenario, rank)[1] for rank in range(context.size))
    pending = dispatcher.dispatch_begin(
        rows.hidden_states, rows.topk_ids, rows.topk_weights, DispatchStep(source_counts=counts), 0
    )
    received = dispatcher.dispatch_end(pending)
    ids, weights = received.local_topk_ids, received.row_weights
    assert ids is not None
    assert weights is not None
    first = context.place(scenario.sizes).moe_ep_rank * scenario.experts_a_rank
    factors = torch.where(ids >= 0, weights * (ids + first + 0.37), 0.0).sum(dim=1, keepdim=True)
    out = torch.where(factors != 0, received.rows.float(), 0.0) * factors
    result = dispatcher.combine_end(dispatcher.combine_begin(out, received)).value
    return result, received.rows.shape[0], (ids >= 0).sum(dim=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_round_and_two_rounds_give_the_same_bits(dtype: str) -> None:
    scenario = attrs.evolve(SCENARIO, dtype=dtype)
    world = OneProcessWorld(SIZES)
    for one, two in zip(world.run(combined, scenario, 1 << 20), world.run(combined, scenario, 0), strict=True):
        assert torch.equal(one[0], two[0])


def test_a_row_travels_once_to_a_rank_that_holds_several_of_its_experts() -> None:
    for _, arrived, pairs in OneProcessWorld(SIZES).run(combined, SCENARIO, 0):
        assert arrived == len(pairs)
        assert bool((pairs >= 1).all())
    scenario = attrs.evolve(SCENARIO, routing="first_rank")
    first, *others = OneProcessWorld(SIZES).run(combined, scenario, 0)
    assert first[1] == sum(SCENARIO.live_tokens)
    assert first[2].tolist() == [3] * first[1]
    assert [other[1] for other in others] == [0, 0, 0]


def test_results_do_not_depend_on_the_run(rank_pool: Callable[[int], RankPool]) -> None:
    scenario = DispatchScenario(sizes=resolve_sizes(ranks=2, attn_dp_size=2), live_tokens=(40, 3))
    first, second = (rank_pool(2).run(combined, scenario, 0) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one[0], other[0])


def count_collectives(context: RankContext, sizes: ParallelSizes, one_round_bytes: int) -> list[str]:
    """Names of the collectives of one dispatch and combine."""
    calls: list[str] = []

    class Counting:
        def __init__(self, inner: object) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> object:
            found = getattr(self._inner, name)
            if not callable(found):
                return found

            def call(*args: object) -> object:
                calls.append(name)
                return found(*args)

            return call

    comms = context.comms_of(sizes)
    counting = attrs.evolve(context, comms_of=lambda _: attrs.evolve(comms, moe_ep=Counting(comms.moe_ep)))
    combined(counting, DispatchScenario(sizes=sizes, live_tokens=(3, 2)), one_round_bytes)
    return calls


def test_a_small_step_takes_one_message_a_direction_and_a_large_one_counts_first() -> None:
    sizes = resolve_sizes(ranks=2, attn_dp_size=2)
    for calls in OneProcessWorld(sizes).run(count_collectives, sizes, 1 << 20):
        assert calls == ["all_to_all_begin", "all_to_all_begin"]
    for calls in OneProcessWorld(sizes).run(count_collectives, sizes, 0):
        assert calls == ["all_to_all", "all_to_all_begin", "all_to_all_begin"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden_size", "top_k"), [(64, 3), (5, 1), (7, 8)])
@pytest.mark.parametrize("rows", [0, 1, 6])
def test_the_wire_holds_rows_ids_and_weights_exactly(
    dtype: torch.dtype, hidden_size: int, top_k: int, rows: int
) -> None:
    wire = WireFormat(hidden_size=hidden_size, top_k=top_k, dtype=dtype)
    hidden, weights = torch.randn(rows, hidden_size).to(dtype), torch.rand(rows, top_k)
    ids = torch.randint(-1, 1000, (rows, top_k))
    found = wire.views(wire.pack(hidden, ids, weights))
    assert torch.equal(found[0], hidden)
    assert torch.equal(found[1].long(), ids)
    assert torch.equal(found[2], weights)
    assert wire.row_bytes % 16 == 0
