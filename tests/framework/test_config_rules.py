"""Rules between values: widths, slots, machines."""

from __future__ import annotations

import attrs
import pytest
from crossdock.config import Config, EplbConfig, ParallelConfig
from crossdock.config_load import load_config, set_layer
from crossdock.config_rules import parallel_sizes, physical_experts
from crossdock.errors import ConfigValueError


def problems(*words: str) -> str:
    with pytest.raises(ConfigValueError) as error:
        load_config([set_layer(words)])
    return "\n".join(error.value.problems)


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ({"ranks": 1}, (1, 1, 1, 1)),
        ({"ranks": 8}, (1, 8, 8, 1)),
        ({"ranks": 8, "attn_dp_size": 4}, (4, 2, 8, 1)),
        ({"ranks": 8, "moe_ep_size": 4}, (1, 8, 4, 2)),
        ({"ranks": 8, "moe_tp_size": 2}, (1, 8, 4, 2)),
        ({"ranks": 12, "attn_dp_size": 12}, (12, 1, 12, 1)),
    ],
)
def test_zeros_are_derived(given: dict[str, int], resolved: tuple[int, int, int, int]) -> None:
    sizes = parallel_sizes(ParallelConfig(**given))
    assert (sizes.attn_dp_size, sizes.attn_tp_size, sizes.moe_ep_size, sizes.moe_tp_size) == resolved


def test_widths_that_do_not_multiply_to_the_ranks_are_told_with_the_numbers() -> None:
    told = problems("parallel.ranks=4", "parallel.attn_dp_size=3", "parallel.moe_ep_size=3")
    assert "attn_dp_size 3 * attn_cp_size 1 * attn_tp_size 1 is 3, must be ranks = 4" in told
    assert "moe_ep_size 3 * moe_tp_size 1 is 3, must be ranks = 4" in told


@pytest.mark.parametrize(
    ("slots", "redundant", "logical", "ep", "smallest"),
    [
        (0, 0, 8, 3, 9),
        (0, 2, 8, 3, 12),
        (9, 0, 8, 2, 10),
        (0, 1, 8, 2, 10),
        (7, 0, 8, 2, 8),
        (0, 0, 7, 2, 8),
        (0, 0, 29, 8, 32),
    ],
)
def test_slots_that_do_not_divide_give_the_smallest_number_that_works(
    slots: int, redundant: int, logical: int, ep: int, smallest: int
) -> None:
    config = attrs.evolve(Config(), eplb=EplbConfig(slots=slots, num_redundant_experts=redundant))
    with pytest.raises(
        ConfigValueError, match=f"eplb.slots = {smallest} .num_redundant_experts = {smallest - logical}"
    ):
        physical_experts(config, logical, ep)
    fixed = attrs.evolve(Config(), eplb=EplbConfig(slots=smallest))
    assert physical_experts(fixed, logical, ep) == smallest


@pytest.mark.parametrize(("slots", "max_replicas", "needed"), [(9, 1, 2), (17, 2, 3), (32, 3, 4)])
def test_a_limit_of_replicas_with_which_slots_stay_empty_gives_the_smallest_that_works(
    slots: int, max_replicas: int, needed: int
) -> None:
    config = attrs.evolve(Config(), eplb=EplbConfig(slots=slots, max_replicas=max_replicas))
    with pytest.raises(ConfigValueError, match=f"do not fill {slots} slots; set it to {needed} or more"):
        physical_experts(config, 8, 1)
    assert physical_experts(attrs.evolve(config, eplb=EplbConfig(slots=slots, max_replicas=needed)), 8, 1) == slots
    assert physical_experts(attrs.evolve(config, eplb=EplbConfig(slots=8, max_replicas=1)), 8, 1) == 8


def test_slots_and_redundant_experts_are_two_ways_to_say_the_same() -> None:
    for eplb in (EplbConfig(slots=288), EplbConfig(num_redundant_experts=32)):
        config = attrs.evolve(Config(), eplb=eplb)
        assert [physical_experts(config, 256, ep) for ep in (12, 36, 72)] == [288, 288, 288]
    assert physical_experts(Config(), 8, 4) == 8
    assert "say the same thing twice" in problems("eplb.slots=9", "eplb.num_redundant_experts=1")
    assert "at least 0, found -1" in problems("eplb.num_redundant_experts=-1")


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("expert_share=1.5", "expert_share: a part of a step is at most 1, found 1.5"),
        ("expert_share=-0.5", "expert_share must be at least 0.0, found -0.5"),
        ("late_s=nan", "late_s must be at least 0.01 and finite, found nan"),
        ("link_gbps=inf", "link_gbps must be at least 0.001 and finite, found inf"),
        ("init_location=", "init_location: must be trivial, a file or an inline JSON text"),
        ("interval=0", "interval must be at least 1, found 0"),
        ("max_step_bytes=0", "max_step_bytes must be at least 1, found 0"),
    ],
)
def test_numbers_of_balancing_that_make_no_sense_are_refused(word: str, told: str) -> None:
    assert told in problems(f"eplb.{word}")


def test_rules_of_scheduler_launch_and_dense_layers() -> None:
    told = problems(
        "scheduler.max_running_requests=10",
        "scheduler.max_step_tokens=4",
        "scheduler.kv_tokens=3",
        "launch.nnodes=2",
        "launch.node_rank=2",
        "parallel.ranks=3",
        "parallel.dense_tp_size=2",
    )
    for part in (
        "[scheduler] max_running_requests: 10 is more than max_step_tokens = 4",
        "[scheduler] kv_tokens: 3 is less than one page of 16",
        "[launch] node_rank: 2 is not one of the 2 machines",
        "[launch] rdzv_endpoint: needed for more than one machine",
        "3 ranks do not divide over launch.nnodes = 2",
        "[parallel] dense_tp_size: must be 0, 1 or attn_tp_size = 3, found 2",
    ):
        assert part in told, part
