"""Ways through a dispatcher on one rank of a pool; top-level functions, so that rank processes find them."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.overrides import TorchFunctionMode

from crossdock.dispatch import make_dispatcher
from crossdock.dispatch_guard import GuardedDispatcher
from crossdock.errors import CapacityTooSmall, DispatchMisuse
from crossdock.plugin_call import call_hook
from crossdock.registry import load_plugin
from crossdock.testing.conformance import NotCheckable
from crossdock.testing.dispatch_scenarios import (
    DispatchScenario,
    held_range,
    on_device,
    one_replica,
    routed_rows,
    toy_experts,
    uneven,
)
from crossdock.testing.world import RankContext
from crossdock.types.capability import Environment
from crossdock.types.dispatch import DispatcherCapabilities, DispatcherSpec, DispatchStep, Pending, ReceiveLayout
from crossdock.types.parallel import ParallelSizes

ANNOUNCED_ROWS = 64
"""Rows a rank, where the kit asks the hook and the object the same."""
_UNINITIALISED = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)


def declared_capabilities(
    name: str, options: Mapping[str, object], sizes: ParallelSizes, device: str = "cpu", rows: int = 0
) -> DispatcherCapabilities:
    """What the plugin's hook says for a layout in which a rank brings at most so many rows; 0 leaves that open.

    Raises:
        NotCheckable: it refuses, cannot say, or runs on other devices only.
    """
    dtype = "float32" if device == "cpu" else "bfloat16"
    packages = frozenset(module.name for module in pkgutil.iter_modules())
    env = Environment(
        device=device, sizes=sizes, dtype=dtype, packages=packages, max_rows_per_rank=rows * sizes.attn_tp_size
    )
    found = call_hook(load_plugin("dispatcher", name), "dispatcher_capabilities", options=options, env=env)
    if not isinstance(found, DispatcherCapabilities):
        raise NotCheckable(f"dispatcher_capabilities answered {found!r}")
    if device not in found.devices:
        raise NotCheckable(f"runs on {', '.join(sorted(found.devices))} only")
    return found


def build_dispatcher(
    context: RankContext,
    name: str,
    options: Mapping[str, object],
    scenario: DispatchScenario,
    *,
    max_in_flight: int = 1,
    max_rows_per_rank: int | None = None,
) -> GuardedDispatcher:
    """The plugin's dispatcher for this rank, behind the core's guard; for the scenario's rows when no other limit is given."""
    scenario = on_device(scenario, context.device)
    sizes = scenario.sizes
    if max_rows_per_rank is None:
        layout = declared_capabilities(name, options, sizes, context.device).input_rows
        # A start announces at least a row, even if no step ever brings one.
        max_rows_per_rank = max(1, *(held_range(layout, scenario, rank)[1] for rank in range(sizes.ranks)))
    spec = DispatcherSpec(
        sizes=sizes,
        place=context.place(sizes),
        comms=context.comms_of(sizes),
        hidden_size=scenario.hidden_size,
        top_k=scenario.top_k,
        num_physical_experts=scenario.num_physical_experts,
        dtype=getattr(torch, scenario.dtype),
        device=torch.device(context.device),
        max_rows_per_rank=max_rows_per_rank,
        max_in_flight=max_in_flight,
        accepted_layouts=tuple(ReceiveLayout),
    )
    return make_dispatcher(name, options, spec)


@attrs.define(eq=False)
class Flight:
    """One scenario's way through a dispatcher on one rank, call by call."""

    context: RankContext
    dispatcher: GuardedDispatcher
    scenario: DispatchScenario
    slot: int = 0
    micro_batches: int = 1
    """Micro-batches of the step that the flight belongs to."""
    pending: Pending | None = None
    received_pairs: int = 0

    def __attrs_post_init__(self) -> None:
        self.scenario = on_device(self.scenario, self.context.device)

    def dispatch_begin(self) -> None:
        capabilities, scenario = self.dispatcher.capabilities, self.scenario
        rows = routed_rows(scenario).held(capabilities.input_rows, scenario, self.context.rank)
        counts = tuple(held_range(capabilities.input_rows, scenario, rank)[1] for rank in range(self.context.size))
        step = DispatchStep(micro_batches=self.micro_batches, source_counts=counts if scenario.counts_known else None)
        self.pending = self.dispatcher.dispatch_begin(
            rows.hidden_states, rows.topk_ids, rows.topk_weights, step, self.slot
        )

    def experts(self) -> None:
        """dispatch_end, toy experts, combine_begin."""
        assert self.pending is not None, "dispatch_begin comes first"
        received = self.dispatcher.dispatch_end(self.pending)
        sizes = self.scenario.sizes
        experts = toy_experts(self.scenario)
        if received.local_topk_ids is not None:
            self.received_pairs = int((received.local_topk_ids >= 0).sum())
        elif received.counts is not None:
            self.received_pairs = int(torch.as_tensor(received.counts).sum())
        out = experts.run(received, sizes, self.context.place(sizes))
        self.pending = self.dispatcher.combine_begin(out, received)

    def combine_end(self) -> float:
        """Largest difference from the dense sum, relative to its largest value; owed sums are taken first (collective)."""
        assert self.pending is not None, "experts comes first"
        rows = self.dispatcher.combine_end(self.pending)
        capabilities, scenario = self.dispatcher.capabilities, self.scenario
        declared = (capabilities.output_rows, capabilities.output_owed)
        assert (rows.layout, rows.owed) == declared, (
            f"combined rows are {(rows.layout, rows.owed)}, declared was {declared}"
        )
        result = rows.complete().value
        held = routed_rows(scenario).held(capabilities.output_rows, scenario, self.context.rank)
        experts = toy_experts(scenario)
        clean = torch.where((held.topk_ids >= 0).any(dim=1, keepdim=True), held.hidden_states, 0.0)
        wanted = experts.dense(clean, held.topk_ids, held.topk_weights)
        assert result.shape == wanted.shape, f"{list(result.shape)} instead of {list(wanted.shape)}"
        assert result.dtype == getattr(torch, scenario.dtype), f"combined rows are {result.dtype}"
        if not wanted.numel():
            return 0.0
        scale = max(float(wanted.abs().max()), 1.0)
        return float((result.to(torch.float32) - wanted).abs().max()) / scale


@attrs.frozen(kw_only=True)
class FlightReport:
    """What one rank saw of one scenario."""

    error: float
    received_pairs: int


def fly(
    context: RankContext, name: str, options: Mapping[str, object], scenarios: Sequence[DispatchScenario]
) -> list[FlightReport]:
    """Each scenario through a dispatcher of its own, one after the other. Runs on every rank."""
    reports: list[FlightReport] = []
    for scenario in scenarios:
        flight = Flight(context, build_dispatcher(context, name, options, scenario), scenario)
        flight.dispatch_begin()
        flight.experts()
        reports.append(FlightReport(error=flight.combine_end(), received_pairs=flight.received_pairs))
    return reports


class PoisonedMemory(TorchFunctionMode):
    """Fills every buffer that torch leaves uninitialised: NaN, or the largest value of an integer type."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _UNINITIALISED:
            result.fill_(float("nan") if result.is_floating_point() else torch.iinfo(result.dtype).max)
        return result


def fly_poisoned(
    context: RankContext, name: str, options: Mapping[str, object], scenarios: Sequence[DispatchScenario]
) -> list[FlightReport]:
    """As ``fly`` in poisoned memory."""
    with PoisonedMemory():
        return fly(context, name, options, scenarios)


def two_flights(
    context: RankContext, name: str, options: Mapping[str, object], sizes: ParallelSizes, order: str
) -> list[float]:
    """Two micro-batches in flight in a legal order; each letter is one move of micro-batch a or b."""
    first = DispatchScenario(sizes=sizes, live_tokens=uneven(sizes), seed=1, counts_known=False)
    second = attrs.evolve(first, live_tokens=one_replica(sizes, 4), seed=2)
    dispatcher = build_dispatcher(context, name, options, first, max_in_flight=2)
    flights = {
        "a": Flight(context, dispatcher, first, slot=0, micro_batches=2),
        "b": Flight(context, dispatcher, second, slot=1, micro_batches=2),
    }
    moves = {letter: iter(("dispatch_begin", "experts", "combine_end")) for letter in flights}
    errors: list[float] = []
    for letter in order:
        result = getattr(flights[letter], next(moves[letter]))()
        errors += [] if result is None else [result]
    return errors


def misuses(context: RankContext, name: str, options: Mapping[str, object], sizes: ParallelSizes) -> list[str]:
    """Messages of calls out of order; nobody enters a collective because the guard stops them all before."""
    scenario = DispatchScenario(sizes=sizes, live_tokens=(2,) * sizes.attn_dp_size)
    dispatcher = build_dispatcher(context, name, options, scenario)
    flight = Flight(context, dispatcher, scenario)
    messages: list[str] = []
    flight.dispatch_begin()
    for call in (
        flight.dispatch_begin,
        flight.combine_end,
        lambda: attrs.evolve(flight, slot=1).dispatch_begin(),
    ):
        try:
            call()
        except DispatchMisuse as error:
            messages.append(str(error))
    flight.experts()
    try:
        flight.experts()
    except DispatchMisuse as error:
        messages.append(str(error))
    flight.combine_end()
    flight.dispatch_begin()
    flight.experts()
    flight.combine_end()
    return messages


def overflow(context: RankContext, name: str, options: Mapping[str, object], sizes: ParallelSizes) -> str:
    """What the guard says to nine rows where eight were announced; empty when it lets them through."""
    scenario = DispatchScenario(sizes=sizes, live_tokens=(9,) * sizes.attn_dp_size)
    dispatcher = build_dispatcher(context, name, options, scenario, max_rows_per_rank=8)
    try:
        Flight(context, dispatcher, scenario).dispatch_begin()
    except DispatchMisuse as error:
        return str(error)
    return ""


def too_large(context: RankContext, name: str, options: Mapping[str, object], sizes: ParallelSizes, rows: int) -> int:
    """The capacity that a refused start asks for; 0 when it is not refused."""
    scenario = DispatchScenario(sizes=sizes, live_tokens=(1,) * sizes.attn_dp_size)
    try:
        build_dispatcher(context, name, options, scenario, max_rows_per_rank=rows)
    except CapacityTooSmall as error:
        return error.needed
    return 0


def own_capabilities(
    context: RankContext, name: str, options: Mapping[str, object], sizes: ParallelSizes
) -> DispatcherCapabilities:
    """What the dispatcher that is built for ``ANNOUNCED_ROWS`` a rank says about itself."""
    scenario = DispatchScenario(sizes=sizes, live_tokens=(1,) * sizes.attn_dp_size)
    return build_dispatcher(context, name, options, scenario, max_rows_per_rank=ANNOUNCED_ROWS).capabilities
