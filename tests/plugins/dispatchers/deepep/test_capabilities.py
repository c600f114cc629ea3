"""What ``deepep`` says that it can do, without a GPU: options, capacity, refusals."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from crossdock.errors import ConfigValueError, PluginImportFailed
from crossdock.groups import resolve_sizes
from crossdock.options import read_options
from crossdock.plugin_call import call_hook
from crossdock.registry import load_plugin
from crossdock.types.capability import Environment, Refusal
from crossdock.types.dispatch import DispatcherCapabilities, ReceiveLayout, WireDtype
from crossdock_dispatchers.deepep.capacity import aligned_capacity, queue_depth
from crossdock_dispatchers.deepep.library import BufferPlan, load_deep_ep
from crossdock_dispatchers.deepep.options import DeepEpOptions

TWO = resolve_sizes(ranks=2, attn_dp_size=2)


def answer(options: dict[str, object], **env: Any) -> DispatcherCapabilities | Refusal:
    facts: dict[str, Any] = {
        "device": "cuda",
        "sizes": TWO,
        "dtype": "bfloat16",
        "packages": frozenset({"deep_ep"}),
        "max_rows_per_rank": 8192,
        "max_decode_rows": 256,
    }
    found = call_hook(
        load_plugin("dispatcher", "deepep"),
        "dispatcher_capabilities",
        options=options,
        env=Environment(**{**facts, **env}),
    )
    assert isinstance(found, DispatcherCapabilities | Refusal)
    return found


@pytest.mark.parametrize(
    ("mode", "layouts", "captured", "capacity"),
    [
        ("normal", {ReceiveLayout.TOKEN_ROWS}, False, None),
        ("low_latency", {ReceiveLayout.EXPERT_MAJOR}, True, 512),
        ("auto", {ReceiveLayout.TOKEN_ROWS, ReceiveLayout.EXPERT_MAJOR}, True, None),
    ],
)
def test_each_mode_says_what_it_hands_over(
    mode: str, layouts: set[ReceiveLayout], captured: bool, capacity: int | None
) -> None:
    found = answer({"mode": mode, "num_sms": 20, "overlap_sms": 24}, max_rows_per_rank=512)
    assert isinstance(found, DispatcherCapabilities)
    assert (found.layouts, found.graph_capture, found.capacity_rows_per_rank) == (layouts, captured, capacity)
    assert found.communication_sms == (0 if mode == "low_latency" else 24)
    assert found.wire_dtypes == {WireDtype.NATIVE, WireDtype.FP8_BLOCK}


@pytest.mark.parametrize(
    ("options", "env", "code", "words"),
    [
        ({}, {"packages": frozenset()}, "package_missing", "tokenspeed-deepep==1.2.1.post20251110"),
        ({}, {"dtype": "float32"}, "dtype_not_supported", "checkpoint.dtype = 'bfloat16'"),
        ({}, {"sizes": resolve_sizes(ranks=3, attn_dp_size=3)}, "rank_count_not_supported", "not on 3"),
        ({}, {"num_nodes": 2}, "one_mode_across_nodes", "'normal' or 'low_latency'"),
        ({}, {"max_decode_rows": 2000}, "capacity_too_small", "lower scheduler.max_running_requests"),
        ({"mode": "low_latency"}, {}, "capacity_too_small", "lower scheduler.max_step_tokens"),
        ({"low_latency_rows": 128}, {}, "capacity_too_small", "raise dispatcher.low_latency_rows to 256"),
        ({"low_latency_rows": 4096}, {}, "capacity_too_small", "limit of 1024"),
    ],
)
def test_what_cannot_run_is_refused_with_what_works(
    options: dict[str, object], env: dict[str, Any], code: str, words: str
) -> None:
    found = answer(options, **env)
    assert isinstance(found, Refusal)
    assert found.code == code
    assert words in found.sentence


def test_a_refused_capacity_carries_the_number_that_is_needed() -> None:
    found = answer({"low_latency_rows": 128})
    assert isinstance(found, Refusal)
    assert found.needed == 256


def test_one_rank_is_left_to_the_core() -> None:
    found = answer({}, sizes=resolve_sizes(ranks=1))
    assert isinstance(found, Refusal)
    assert found.code == "rank_count_not_supported"


def test_an_odd_number_of_multiprocessors_is_an_error() -> None:
    for name in ("num_sms", "overlap_sms"):
        with pytest.raises(ConfigValueError, match=f"{name} must be even"):
            read_options(DeepEpOptions, {name: 21}, where="[dispatcher]")


def test_a_failing_import_names_the_wheel_that_fits() -> None:
    with pytest.raises(PluginImportFailed, match=r"crossdock\[deepep\]"):
        load_deep_ep()


def test_the_queue_holds_two_requests_for_each_row_and_is_never_made_shorter() -> None:
    assert queue_depth(128, 0) == 1024
    assert queue_depth(1024, 0) == 2050
    assert queue_depth(128, 4096) == 4096


def test_places_of_an_expert_are_a_multiple_of_the_alignment_and_the_limit_stays_the_limit() -> None:
    for rows in (1, 100, 128, 1024):
        for ranks in (2, 8, 160):
            found = aligned_capacity(rows, ranks, 128)
            assert found * ranks % 128 == 0
            assert rows <= found <= max(1024, rows)


def test_queue_pairs_serve_the_protocol_that_needs_more() -> None:
    plan = BufferPlan(ranks=2, hidden_size=7168, num_experts=256, num_sms=(20, 8), normal=True, low_latency_rows=128)
    assert plan.queue_pairs == 128
    assert attrs.evolve(plan, low_latency_rows=0).queue_pairs == 20
