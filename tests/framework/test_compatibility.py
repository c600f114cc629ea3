"""The check of a whole selection: reason codes, what works instead, and what auto takes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from crossdock.compatibility import check_selection
from crossdock.compatibility_matrix import MATRIX_POINTS, selection_matrix
from crossdock.compatibility_rules import Candidate, findings
from crossdock.config_load import load_config, set_layer
from crossdock.dispatch_capacity import RowLimits
from crossdock.errors import ConfigValueError, PluginDeclined, SelectionRefused, UnknownPlugin
from crossdock.groups import resolve_sizes
from crossdock.types.attention import AttentionCapabilities, KvSpec
from crossdock.types.capability import Environment, ModelCapabilities
from crossdock.types.dispatch import DispatcherCapabilities, ReceiveLayout, WireDtype
from crossdock.types.experts import ExpertsCapabilities
from crossdock.types.layout import COMPLETE, LOCAL_ROWS
from crossdock.types.location import PickerCapabilities
from crossdock.types.model import ModelInfo, MoeSpec
from crossdock.types.selection import Selection
from crossdock.types.strategy import StrategyCapabilities

Install = Callable[..., None]

MODEL = ModelInfo(
    model_type="qwen3_moe",
    num_layers=2,
    hidden_size=64,
    vocab_size=100,
    max_position_embeddings=128,
    kv=KvSpec(kind="gqa", num_kv_heads=2, head_dim=8, v_head_dim=8),
    num_heads=4,
    moe=MoeSpec(layers=(0, 1), num_logical_experts=8, top_k=2, hidden_size=64, intermediate_size=32),
)


def selection_of(*words: str, model: ModelInfo | None = None) -> Selection:
    return check_selection(load_config([set_layer(words)]).config, model=model)


def refused(*words: str, model: ModelInfo | None = None) -> SelectionRefused:
    with pytest.raises(SelectionRefused) as error:
        selection_of(*words, model=model)
    return error.value


def candidate(**changes: Any) -> Candidate:
    """A selection that works, with changes; a change of ``env`` is a dict of fields."""
    env = Environment(device="cpu", sizes=resolve_sizes(ranks=4), dtype="float32", model=MODEL)
    fields: dict[str, Any] = {
        "env": attrs.evolve(env, **changes.pop("env", {})),
        "names": {point: f"some_{point}" for point in (*MATRIX_POINTS, "model")},
        "dispatcher": DispatcherCapabilities(
            layouts=frozenset({ReceiveLayout.TOKEN_ROWS}),
            input_rows=LOCAL_ROWS,
            output_rows=LOCAL_ROWS,
            output_owed=COMPLETE,
            needs_full_ep=True,
            rank_invariant_picks_needed=False,
        ),
        "experts": ExpertsCapabilities(layouts=(ReceiveLayout.TOKEN_ROWS,)),
        "strategy": StrategyCapabilities(),
        "expert_location": PickerCapabilities(rank_invariant=True),
        "attention": AttentionCapabilities(),
        "model": ModelCapabilities(),
        "limits": RowLimits(max_step_tokens=64, max_running_requests=8),
    }
    for name, change in changes.items():
        fields[name] = attrs.evolve(fields[name], **change) if isinstance(change, dict) else change
    return Candidate(**fields)


def codes(**changes: Any) -> list[str]:
    return [finding.refusal.code for finding in findings(candidate(**changes))]


def test_a_selection_that_fits_has_no_finding() -> None:
    assert codes() == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"env": {"sizes": resolve_sizes(ranks=4, moe_ep_size=2)}}, "a2a_needs_full_ep"),
        ({"env": {"sizes": resolve_sizes(ranks=4, attn_cp_size=2)}}, "attn_cp_refused"),
        ({"env": {"sizes": resolve_sizes(ranks=4, attn_cp_size=2, moe_dp_size=2, moe_ep_size=2)}}, "moe_dp_refused"),
        ({"env": {"device": "cuda"}, "strategy": {"devices": frozenset({"cpu"})}}, "device_not_supported"),
        ({"env": {"dtype": "float16"}}, "dtype_not_supported"),
        ({"dispatcher": {"phases": frozenset({"decode"})}}, "phase_not_supported"),
        ({"dispatcher": {"capacity_rows_per_rank": 15}}, "capacity_too_small"),
        ({"dispatcher": {"layouts": frozenset({ReceiveLayout.FLAT})}}, "layout_not_accepted"),
        ({"dispatcher": {"wire_dtypes": frozenset({WireDtype.FP8_BLOCK})}}, "wire_dtype_not_supported"),
        (
            {"dispatcher": {"rank_invariant_picks_needed": True}, "expert_location": {"rank_invariant": False}},
            "rank_invariant_picks_needed",
        ),
        ({"expert_location": {"needs_load": True}}, "recorder_needed"),
        ({"strategy": {"micro_batches": 3}}, "too_many_in_flight"),
        ({"model": {"strategies": frozenset({"other"})}}, "strategy_not_supported"),
        ({"attention": {"kinds": frozenset({"mla"})}}, "attention_kind_not_supported"),
        ({"survive_dead_rank": True}, "dead_rank_not_survived"),
        (
            {"launcher": "torchrun", "dispatcher": {"survives_dead_rank": True}, "survive_dead_rank": True},
            "dead_rank_not_survived",
        ),
        ({"launcher": "ray"}, "launcher_not_available"),
        ({"env": {"graph_capture": True}}, "graph_not_supported"),
    ],
)
def test_each_rule_has_its_code(changes: dict[str, Any], code: str) -> None:
    assert code in codes(**changes)


def test_the_needed_capacity_is_a_number_that_works() -> None:
    (finding,) = findings(candidate(dispatcher={"capacity_rows_per_rank": 15}))
    needed = finding.refusal.needed
    assert needed is not None
    assert codes(dispatcher={"capacity_rows_per_rank": needed}) == []
    assert codes(dispatcher={"capacity_rows_per_rank": needed - 1}) == ["capacity_too_small"]


def test_rows_by_token_suit_experts_that_take_sorted_rows_because_the_core_sorts_them() -> None:
    assert codes(experts={"layouts": (ReceiveLayout.FLAT,)}) == []
    assert codes(experts={"layouts": (ReceiveLayout.EXPERT_MAJOR,)}) == ["layout_not_accepted"]


def test_every_layout_of_a_dispatcher_with_two_protocols_must_be_taken() -> None:
    both = {"layouts": frozenset({ReceiveLayout.TOKEN_ROWS, ReceiveLayout.EXPERT_MAJOR})}
    assert codes(dispatcher=both, experts={"layouts": (ReceiveLayout.TOKEN_ROWS,)}) == []
    assert codes(dispatcher=both, experts={"layouts": (ReceiveLayout.FLAT,)}) == ["layout_not_accepted"]


def test_one_rank_needs_no_rank_invariance() -> None:
    changes = {"dispatcher": {"rank_invariant_picks_needed": True}, "expert_location": {"rank_invariant": False}}
    assert codes(**changes, env={"sizes": resolve_sizes(ranks=1)}) == []


def test_fp8_weights_ask_for_experts_that_take_them() -> None:
    moe = attrs.evolve(MODEL.moe, weight_dtype="fp8_block")
    assert codes(env={"model": attrs.evolve(MODEL, moe=moe)}) == ["dtype_not_supported"]


def test_the_default_selection_is_accepted_on_any_number_of_ranks() -> None:
    for ranks in (1, 2, 4):
        assert selection_of(f"parallel.ranks={ranks}").sizes.ranks == ranks


@pytest.mark.parametrize("dispatcher", ["allgatherv", "alltoallv"])
@pytest.mark.parametrize("padding", ["cost", "max_len", "sum_len"])
def test_every_cpu_dispatcher_and_padding_is_accepted_on_one_rank(dispatcher: str, padding: str) -> None:
    chosen = selection_of(f"dispatcher.name={dispatcher}", f"padding.name={padding}")
    assert chosen.plugin("dispatcher").name == dispatcher
    assert chosen.plugin("padding").name == padding


def test_an_all_to_all_without_full_ep_is_refused_with_what_works() -> None:
    error = refused("parallel.ranks=4", "parallel.moe_ep_size=2", "dispatcher.name=alltoallv")
    assert error.codes == ("a2a_needs_full_ep",)
    assert "moe_ep_size = 2 of 4; set parallel.moe_ep_size = 4" in error.sentences[0]
    assert "works instead: dispatcher 'allgatherv'" in error.sentences[0]
    assert str(error).endswith("[a2a_needs_full_ep]")


def test_several_reasons_are_all_given() -> None:
    error = refused(
        "parallel.ranks=4", "parallel.moe_ep_size=2", "dispatcher.name=alltoallv", "launch.on_dead_rank=survive"
    )
    assert set(error.codes) == {"a2a_needs_full_ep", "dead_rank_not_survived"}


def test_auto_takes_the_first_of_its_list_that_fits_and_says_why_not_the_others() -> None:
    chosen = selection_of("parallel.ranks=2", model=MODEL).plugin("expert_location")
    assert chosen.name == "dynamic"
    assert [(other.name, other.code) for other in chosen.passed_over] == [("static", "rank_invariant_picks_needed")]
    spread = selection_of("parallel.ranks=2", "parallel.attn_dp_size=2", "dispatcher.name=alltoallv").plugin(
        "expert_location"
    )
    assert (spread.name, spread.passed_over) == ("static", ())


def test_one_rank_takes_any_dispatchers_name_and_says_what_runs() -> None:
    chosen = selection_of("dispatcher.name=nvlink", "padding.name=sum_len", model=MODEL).plugin("dispatcher")
    assert chosen.name == "alltoallv"
    assert [(other.name, other.code) for other in chosen.passed_over] == [("nvlink", "device_not_supported")]
    assert refused("parallel.ranks=2", "dispatcher.name=nvlink").codes == ("device_not_supported",)
    with pytest.raises(UnknownPlugin):
        selection_of("dispatcher.name=nobodys")


def test_auto_is_an_error_where_the_core_has_no_list() -> None:
    with pytest.raises(
        ConfigValueError, match=r"\[padding\] name: \"auto\" is for experts, expert_location, attention"
    ):
        selection_of("padding.name=auto")


def test_options_are_read_by_the_plugins_and_reported_together() -> None:
    with pytest.raises(ConfigValueError) as error:
        selection_of("dispatcher.nothing=1", "padding.neither=2", "strategy.name=sequentail")
    told = str(error.value)
    assert "[dispatcher]: unknown key 'nothing'" in told
    assert "[padding]: unknown key 'neither'" in told
    assert "no strategy plugin 'sequentail' (did you mean 'sequential'?)" in told


def test_planner_and_policy_are_not_loaded_while_nothing_is_rebalanced() -> None:
    chosen = selection_of("eplb_algo.name=nobodys", "rebalance_policy.name=nobodys")
    assert "eplb_algo" not in [plugin.point for plugin in chosen.plugins]
    with pytest.raises((UnknownPlugin, ConfigValueError), match="nobodys"):
        selection_of("eplb.enabled=true", "eplb_algo.name=nobodys")


DISPATCHER = """
from crossdock.hookapi import hookimpl
from crossdock.types.capability import Refusal
HOOK_API_VERSION = 1

@hookimpl
def make_dispatcher(options, spec):
    return None

@hookimpl
def dispatcher_capabilities(options, env):
    return {answer}
"""


def test_a_plugins_own_refusal_keeps_its_code_and_the_others_are_named(install: Install) -> None:
    answer = "Refusal(code='package_missing', sentence='deep_ep is not installed; pip install x')"
    install(
        "d",
        entry_points={"crossdock.dispatcher": {"mine": "d.plugin"}},
        modules={"d.plugin": DISPATCHER.format(answer=answer)},
    )
    error = refused("parallel.ranks=2", "dispatcher.name=mine")
    assert error.codes == ("package_missing",)
    assert "deep_ep is not installed; pip install x; works instead: dispatcher 'allgatherv'" in error.sentences[0]


def test_a_dispatcher_that_states_no_capabilities_is_refused(install: Install) -> None:
    install(
        "d",
        entry_points={"crossdock.dispatcher": {"mine": "d.plugin"}},
        modules={"d.plugin": DISPATCHER.format(answer="None")},
    )
    with pytest.raises(PluginDeclined, match="states no capabilities"):
        selection_of("dispatcher.name=mine")


def test_a_broken_neighbour_is_not_imported(install: Install) -> None:
    install(
        "b", entry_points={"crossdock.dispatcher": {"broken": "b.plugin"}}, modules={"b.plugin": "raise SystemExit(1)"}
    )
    assert selection_of("parallel.ranks=2").plugin("dispatcher").name == "allgatherv"
    assert "b.plugin" not in sys.modules


def test_observers_are_loaded_by_name_and_stray_options_are_refused() -> None:
    chosen = selection_of("observer.names=['prometheus']", "observer.prometheus.every_steps=5")
    assert [(observer.name, observer.options) for observer in chosen.observers] == [("prometheus", {"every_steps": 5})]
    with pytest.raises(ConfigValueError, match=r"\[observer\.prometheus\]: options of an observer that is not in"):
        selection_of("observer.prometheus.every_steps=5")


def test_the_matrix_holds_every_combination_and_names_what_cannot_be_loaded(install: Install) -> None:
    install(
        "b", entry_points={"crossdock.dispatcher": {"broken": "b.plugin"}}, modules={"b.plugin": "raise SystemExit(1)"}
    )
    config = load_config([set_layer(["parallel.ranks=4", "parallel.moe_ep_size=2"])]).config
    rows, broken = selection_matrix(config)
    by_dispatcher = {row.names[0]: row for row in rows if row.names[1:] == ("torch", "sequential", "dynamic", "torch")}
    assert by_dispatcher["allgatherv"].refusals == ()
    assert [refusal.code for refusal in by_dispatcher["alltoallv"].refusals] == ["a2a_needs_full_ep"]
    assert ["SystemExit" in refusal.sentence for refusal in broken] == [True]
    assert len({row.names for row in rows}) == len(rows)


def test_checking_a_selection_imports_no_torch() -> None:
    code = (
        "import sys; from crossdock.compatibility import check_selection; from crossdock.config import Config;"
        "check_selection(Config()); print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "False"


@pytest.mark.parametrize(("weights", "first"), [("native", "triton"), ("fp8_block", "deep_gemm")])
def test_auto_tries_the_experts_first_that_are_fastest_for_the_weights(weights: str, first: str) -> None:
    assert MODEL.moe is not None
    model = attrs.evolve(MODEL, moe=attrs.evolve(MODEL.moe, weight_dtype=weights))
    passed = selection_of("experts.name=auto", model=model).plugin("experts").passed_over
    assert passed[0].name == first
