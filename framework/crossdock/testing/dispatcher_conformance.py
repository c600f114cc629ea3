"""What must hold for a dispatcher, on 1, 2 and 4 gloo ranks: combine's result is the weighted sum, and no row vanishes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from crossdock.testing.conformance import NotCheckable, PluginCase, check_of
from crossdock.testing.dispatch_flights import (
    ANNOUNCED_ROWS,
    FlightReport,
    fly,
    fly_poisoned,
    misuses,
    overflow,
    own_capabilities,
    too_large,
    two_flights,
)
from crossdock.testing.dispatch_layouts import capabilities_of, layouts_of, two_ranks, world_sizes
from crossdock.testing.dispatch_scenarios import DispatchScenario, one_replica, routed_rows, uneven
from crossdock.types.parallel import ParallelSizes

FP32_TOLERANCE = 1e-5
"""Other orders of a few additions."""
BF16_TOLERANCE = 2e-2
"""Each partial sum is rounded to 8 bits once or twice."""


def _tolerance(case: PluginCase, rounding: float) -> float:
    return max(rounding, case.tolerance, 0.0 if case.device == "cpu" else BF16_TOLERANCE)


def _fly_all(
    case: PluginCase, scenarios_of: Callable[[ParallelSizes], Sequence[DispatchScenario]], tolerance: float
) -> None:
    for world_size in world_sizes(case):
        scenarios = [scenario for sizes in layouts_of(case, world_size) for scenario in scenarios_of(sizes)]
        reports = case.pool_of(world_size).run(fly, case.name, dict(case.options), scenarios)
        for number, scenario in enumerate(scenarios):
            _check_reports(scenario, [by_rank[number] for by_rank in reports], _tolerance(case, tolerance))


def _check_reports(scenario: DispatchScenario, reports: Sequence[FlightReport], tolerance: float) -> None:
    errors = [report.error for report in reports]
    assert max(errors) <= tolerance, f"{scenario}: relative errors by rank {errors}, tolerance {tolerance}"
    wanted = int((routed_rows(scenario).topk_ids >= 0).sum()) * scenario.sizes.moe_tp_size
    found = sum(report.received_pairs for report in reports)
    assert found == wanted, f"{scenario}: {found} (row, expert) pairs arrived, the router sent {wanted}"


def check_identity_experts_return_the_input(case: PluginCase) -> None:
    _fly_all(
        case,
        lambda sizes: [DispatchScenario(sizes=sizes, live_tokens=uneven(sizes), experts="identity")],
        FP32_TOLERANCE,
    )


def check_every_row_gets_the_weighted_sum_of_its_experts(case: PluginCase) -> None:
    _fly_all(
        case,
        lambda sizes: [
            DispatchScenario(sizes=sizes, live_tokens=uneven(sizes), seed=seed, counts_known=known)
            for seed, known in ((1, True), (2, False))
        ],
        FP32_TOLERANCE,
    )


def check_many_rows_arrive_too(case: PluginCase) -> None:
    _fly_all(
        case,
        lambda sizes: [DispatchScenario(sizes=sizes, live_tokens=(96,) * sizes.attn_dp_size, top_k=2)],
        FP32_TOLERANCE,
    )


def check_bfloat16_rows_stay_bfloat16(case: PluginCase) -> None:
    _fly_all(
        case,
        lambda sizes: [DispatchScenario(sizes=sizes, live_tokens=uneven(sizes), dtype="bfloat16")],
        BF16_TOLERANCE,
    )


def check_a_rank_without_rows_joins(case: PluginCase) -> None:
    _fly_all(
        case,
        lambda sizes: [
            DispatchScenario(sizes=sizes, live_tokens=one_replica(sizes, rows), counts_known=known)
            for rows in (0, 1, 4)
            for known in (True, False)
        ],
        FP32_TOLERANCE,
    )


def check_all_rows_may_go_to_one_rank(case: PluginCase) -> None:
    _fly_all(
        case,
        lambda sizes: [
            DispatchScenario(
                sizes=sizes, live_tokens=(rows,) * sizes.attn_dp_size, routing="first_rank", counts_known=False
            )
            for rows in (1, 64)
        ],
        FP32_TOLERANCE,
    )


def check_all_rows_may_go_to_one_expert(case: PluginCase) -> None:
    _fly_all(
        case,
        lambda sizes: [
            DispatchScenario(sizes=sizes, live_tokens=(rows,) * sizes.attn_dp_size, routing="one_expert", top_k=top_k)
            for rows, top_k in ((1, 1), (63, 1), (63, 3))
        ],
        FP32_TOLERANCE,
    )


def check_a_row_may_go_to_two_replicas_of_an_expert(case: PluginCase) -> None:
    """On one rank and on two; whatever the weights of the two, the row gets that expert's output."""
    _fly_all(
        case,
        lambda sizes: [
            DispatchScenario(
                sizes=sizes, live_tokens=(rows,) * sizes.attn_dp_size, routing="replicas", experts="replicated", top_k=2
            )
            for rows in (1, 33)
        ],
        FP32_TOLERANCE,
    )


def check_ids_of_minus_one_add_nothing(case: PluginCase) -> None:
    _fly_all(
        case,
        lambda sizes: [
            DispatchScenario(sizes=sizes, live_tokens=uneven(sizes), routing=routing, counts_known=known)
            for routing in ("holes", "nowhere")
            for known in (True, False)
        ],
        FP32_TOLERANCE,
    )


def check_unused_buffer_rows_are_never_read(case: PluginCase) -> None:
    for world_size in world_sizes(case):
        scenarios = [
            DispatchScenario(sizes=sizes, live_tokens=one_replica(sizes, 3), routing="holes")
            for sizes in layouts_of(case, world_size)
        ]
        reports = case.pool_of(world_size).run(fly_poisoned, case.name, dict(case.options), scenarios)
        for number, scenario in enumerate(scenarios):
            _check_reports(scenario, [by_rank[number] for by_rank in reports], _tolerance(case, FP32_TOLERANCE))


def check_constants_1_and_10_weighted_7_to_3_give_3_7(case: PluginCase) -> None:
    """Weights are applied exactly once, by combine or by the experts."""
    _fly_all(
        case,
        lambda sizes: [
            DispatchScenario(
                sizes=sizes, live_tokens=(1,) * sizes.attn_dp_size, routing="pair", experts="constants", top_k=2
            )
        ],
        FP32_TOLERANCE,
    )


def check_two_micro_batches_may_be_in_flight(case: PluginCase) -> None:
    sizes = two_ranks(case)
    if capabilities_of(case, sizes).max_in_flight < 2:
        raise NotCheckable("allows one micro-batch in flight")
    for order in ("ababab", "abbaab", "aabbab", "abbbaa", "aaabbb"):
        for errors in case.pool_of(2).run(two_flights, case.name, dict(case.options), sizes, order):
            assert max(errors) <= _tolerance(case, FP32_TOLERANCE), f"order {order}: relative errors {errors}"


def check_calls_out_of_order_raise_with_the_stage(case: PluginCase) -> None:
    for messages in case.pool_of(2).run(misuses, case.name, dict(case.options), two_ranks(case)):
        assert len(messages) == 4, f"some misuse was not noticed: {messages}"
        assert "after dispatch_begin" in messages[0], messages
        assert "slot 1" in messages[2], messages


def check_rows_beyond_the_limit_are_refused_not_lost(case: PluginCase) -> None:
    ranks = world_sizes(case)[0]
    for message in case.pool_of(ranks).run(overflow, case.name, dict(case.options), layouts_of(case, ranks)[0]):
        assert "9 rows" in message, f"9 rows with a limit of 8: {message!r}"


def check_a_start_beyond_its_capacity_names_the_number(case: PluginCase) -> None:
    ranks = world_sizes(case)[0]
    sizes = layouts_of(case, ranks)[0]
    capacity = capabilities_of(case, sizes).capacity_rows_per_rank
    if capacity is None:
        raise NotCheckable("has no capacity limit")
    for needed in case.pool_of(ranks).run(too_large, case.name, dict(case.options), sizes, capacity + 1):
        assert needed == capacity + 1, f"the error says {needed} rows are needed, asked for were {capacity + 1}"


def check_it_can_do_what_its_hook_said(case: PluginCase) -> None:
    for ranks in world_sizes(case):
        for sizes in layouts_of(case, ranks):
            for found in case.pool_of(ranks).run(own_capabilities, case.name, dict(case.options), sizes):
                wanted = capabilities_of(case, sizes, ANNOUNCED_ROWS)
                assert found == wanted, f"the object says {found}, dispatcher_capabilities said {wanted}"


CHECKS = tuple(
    check_of(check)
    for check in (
        check_identity_experts_return_the_input,
        check_every_row_gets_the_weighted_sum_of_its_experts,
        check_many_rows_arrive_too,
        check_bfloat16_rows_stay_bfloat16,
        check_a_rank_without_rows_joins,
        check_all_rows_may_go_to_one_rank,
        check_all_rows_may_go_to_one_expert,
        check_a_row_may_go_to_two_replicas_of_an_expert,
        check_ids_of_minus_one_add_nothing,
        check_unused_buffer_rows_are_never_read,
        check_constants_1_and_10_weighted_7_to_3_give_3_7,
        check_two_micro_batches_may_be_in_flight,
        check_calls_out_of_order_raise_with_the_stage,
        check_rows_beyond_the_limit_are_refused_not_lost,
        check_a_start_beyond_its_capacity_names_the_number,
        check_it_can_do_what_its_hook_said,
    )
)
