"""Pure rules of what works together: capabilities and widths in, reason codes and sentences out (DESIGN section 4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from crossdock.dispatch_capacity import RowLimits, needed_rows_per_rank
from crossdock.experts import layouts_needed
from crossdock.types.attention import AttentionCapabilities
from crossdock.types.capability import Environment, ModelCapabilities, Refusal
from crossdock.types.dispatch import DispatcherCapabilities
from crossdock.types.experts import ExpertsCapabilities
from crossdock.types.location import PickerCapabilities
from crossdock.types.strategy import StrategyCapabilities

PHASES = frozenset({"prefill", "decode"})


@attrs.frozen(kw_only=True)
class Candidate:
    """One selection under test: names and capabilities by point, and where it is to run."""

    env: Environment
    names: Mapping[str, str]
    dispatcher: DispatcherCapabilities
    experts: ExpertsCapabilities
    strategy: StrategyCapabilities
    expert_location: PickerCapabilities
    attention: AttentionCapabilities
    model: ModelCapabilities
    limits: RowLimits
    survive_dead_rank: bool = False
    recorder_is_on: bool = False
    launcher: str = "local"


@attrs.frozen(kw_only=True)
class Finding:
    """A refusal, and the points of which another plugin may help."""

    refusal: Refusal
    points: tuple[str, ...] = ()


def findings(candidate: Candidate) -> tuple[Finding, ...]:
    """Why the selection cannot run; empty when it can."""
    return tuple(finding for rule in RULES for finding in rule(candidate))


def refused_widths(candidate: Candidate) -> list[Finding]:
    """Context parallelism and copies of all experts exist as group data only."""
    sizes = candidate.env.sizes
    found: list[Finding] = []
    if sizes.attn_cp_size > 1:
        found.append(
            _finding(
                "attn_cp_refused",
                f"attn_cp_size = {sizes.attn_cp_size} is not run; set parallel.attn_cp_size = 1 and give the ranks to attn_tp_size",
            )
        )
    if sizes.moe_dp_size > 1:
        found.append(
            _finding(
                "moe_dp_refused",
                f"moe_dp_size = {sizes.moe_dp_size} is not run; set parallel.moe_dp_size = 1 and give the ranks to moe_ep_size",
            )
        )
    return found


def launchers(candidate: Candidate) -> list[Finding]:
    """``ray`` is a name without code yet; torchrun's agent stops all ranks when one dies."""
    found: list[Finding] = []
    if candidate.launcher == "ray":
        found.append(
            _finding(
                "launcher_not_available",
                'launcher "ray" is not available yet; set launch.launcher = "local" or "torchrun"',
            )
        )
    if candidate.launcher == "torchrun" and candidate.survive_dead_rank:
        sentence = 'torchrun\'s agent stops all ranks when one dies; set launch.on_dead_rank = "stop_all"'
        found.append(_finding("dead_rank_not_survived", sentence))
    return found


def device_and_dtype(candidate: Candidate) -> list[Finding]:
    """Each part runs on the device, and with the weights' and the compute dtype."""
    env, found = candidate.env, list[Finding]()
    on_device = {
        "dispatcher": candidate.dispatcher.devices,
        "experts": candidate.experts.devices,
        "strategy": candidate.strategy.devices,
        "attention": candidate.attention.devices,
        "model": candidate.model.devices,
    }
    for point, devices in on_device.items():
        if env.device not in devices:
            sentence = f"{_name(candidate, point)} runs on {_listed(devices)}, not on {env.device}"
            found.append(_finding("device_not_supported", sentence, point))
    weights = env.model.moe.weight_dtype if env.model is not None and env.model.moe is not None else "native"
    needed = {
        "experts": (env.dtype if weights == "native" else weights, candidate.experts.weight_dtypes),
        "attention": (env.dtype, candidate.attention.dtypes),
        "model": (env.dtype, candidate.model.dtypes),
    }
    for point, (dtype, accepted) in needed.items():
        if dtype not in accepted:
            sentence = f"{_name(candidate, point)} takes {_listed(accepted)}, not {dtype}"
            found.append(_finding("dtype_not_supported", sentence, point))
    return found


def dispatcher_layout(candidate: Candidate) -> list[Finding]:
    """The parallel layout, the phases and the failure policy suit the dispatcher."""
    sizes, dispatcher, found = candidate.env.sizes, candidate.dispatcher, list[Finding]()
    name = _name(candidate, "dispatcher")
    if dispatcher.needs_full_ep and sizes.moe_ep_size != sizes.ranks:
        sentence = (
            f"{name} needs the experts split over all ranks, found moe_ep_size = {sizes.moe_ep_size} of {sizes.ranks}; "
            f"set parallel.moe_ep_size = {sizes.ranks}"
        )
        found.append(_finding("a2a_needs_full_ep", sentence, "dispatcher", needed=sizes.ranks))
    missing = PHASES - dispatcher.phases
    if missing:
        found.append(_finding("phase_not_supported", f"{name} cannot {_listed(missing)}", "dispatcher"))
    if candidate.survive_dead_rank and not dispatcher.survives_dead_rank:
        sentence = f'{name} does not survive a dead rank; set launch.on_dead_rank = "stop_all"'
        found.append(_finding("dead_rank_not_survived", sentence, "dispatcher"))
    if candidate.env.graph_capture and not dispatcher.graph_capture:
        found.append(_finding("graph_not_supported", f"{name} cannot be captured in a graph", "dispatcher"))
    return found


def capacity(candidate: Candidate) -> list[Finding]:
    """The rows of a step fit the dispatcher's buffers."""
    dispatcher = candidate.dispatcher
    if dispatcher.capacity_rows_per_rank is None:
        return []
    needed = needed_rows_per_rank(candidate.limits, dispatcher.input_rows, candidate.env.sizes)
    if needed <= dispatcher.capacity_rows_per_rank:
        return []
    sentence = (
        f"{_name(candidate, 'dispatcher')} takes at most {dispatcher.capacity_rows_per_rank} rows a rank and the limits allow "
        f"{needed}; raise its capacity to {needed} or lower scheduler.max_step_tokens"
    )
    return [_finding("capacity_too_small", sentence, "dispatcher", needed=needed)]


def dispatcher_and_experts(candidate: Candidate) -> list[Finding]:
    """What the dispatcher hands over is what the experts take, after the permutations that the core can insert."""
    found: list[Finding] = []
    pair = f"{_name(candidate, 'dispatcher')} and {_name(candidate, 'experts')}"
    reachable = layouts_needed(candidate.experts.layouts)
    left = candidate.dispatcher.layouts - set(reachable)
    if left:
        handed = _listed(layout.value for layout in left)
        taken = _listed(layout.value for layout in reachable)
        sentence = f"{pair}: rows are handed over as {handed} and taken as {taken}"
        found.append(_finding("layout_not_accepted", sentence, "experts", "dispatcher"))
    if not candidate.dispatcher.wire_dtypes & candidate.experts.wire_dtypes:
        sent = _listed(wire.value for wire in candidate.dispatcher.wire_dtypes)
        taken = _listed(wire.value for wire in candidate.experts.wire_dtypes)
        found.append(
            _finding("wire_dtype_not_supported", f"{pair}: sent as {sent}, taken as {taken}", "experts", "dispatcher")
        )
    return found


def picker(candidate: Candidate) -> list[Finding]:
    """Partial sums over the same rows need the same replica everywhere; a picker that reads loads needs the recorder."""
    found: list[Finding] = []
    name = _name(candidate, "expert_location")
    if (
        candidate.env.sizes.ranks > 1
        and candidate.dispatcher.rank_invariant_picks_needed
        and not candidate.expert_location.rank_invariant
    ):
        sentence = f"{name} may pick another replica on each rank, and {_name(candidate, 'dispatcher')} sums over the ranks' rows"
        found.append(_finding("rank_invariant_picks_needed", sentence, "expert_location", "dispatcher"))
    if candidate.expert_location.needs_load and not candidate.recorder_is_on:
        found.append(
            _finding("recorder_needed", f'{name} reads expert loads; set recorder.mode = "stat"', "expert_location")
        )
    if candidate.env.graph_capture and not candidate.expert_location.capturable:
        found.append(_finding("graph_not_supported", f"{name} cannot be captured in a graph", "expert_location"))
    return found


def strategy(candidate: Candidate) -> list[Finding]:
    """The micro-batches in flight fit the dispatcher, and the model declares ops for the strategy."""
    found: list[Finding] = []
    name = _name(candidate, "strategy")
    wanted, allowed = candidate.strategy.micro_batches, candidate.dispatcher.max_in_flight
    if wanted > allowed:
        sentence = f"{name} has {wanted} micro-batches in flight and {_name(candidate, 'dispatcher')} allows {allowed}"
        found.append(_finding("too_many_in_flight", sentence, "strategy", "dispatcher", needed=wanted))
    accepted = candidate.model.strategies
    if accepted is not None and candidate.names.get("strategy") not in accepted:
        sentence = f"{_name(candidate, 'model')} declares ops for {_listed(accepted)}, not for {name}"
        found.append(_finding("strategy_not_supported", sentence, "strategy"))
    return found


def attention_kind(candidate: Candidate) -> list[Finding]:
    """The backend knows the model's form of the cache."""
    model = candidate.env.model
    if model is None or model.kv.kind in candidate.attention.kinds:
        return []
    sentence = (
        f"{_name(candidate, 'attention')} knows {_listed(candidate.attention.kinds)}, the model needs {model.kv.kind}"
    )
    return [_finding("attention_kind_not_supported", sentence, "attention")]


RULES: tuple[Callable[[Candidate], list[Finding]], ...] = (
    refused_widths,
    launchers,
    device_and_dtype,
    dispatcher_layout,
    capacity,
    dispatcher_and_experts,
    picker,
    strategy,
    attention_kind,
)


def _finding(code: str, sentence: str, *points: str, needed: int | None = None) -> Finding:
    return Finding(refusal=Refusal(code=code, sentence=sentence, needed=needed), points=points)


def _name(candidate: Candidate, point: str) -> str:
    return f"{point} {candidate.names.get(point, '')!r}"


def _listed(words: Any) -> str:
    return ", ".join(sorted(words)) or "nothing"
