"""Assembles what a model's MoE blocks run on: dispatcher, experts, replica picker, placement maps, recorder."""

from __future__ import annotations

import torch

from crossdock.comm import RankComms
from crossdock.dispatch import make_dispatcher
from crossdock.dispatch_capacity import RowLimits, needed_rows_per_rank
from crossdock.errors import ConfigValueError
from crossdock.experts import adapt_experts, agreed_wire, layouts_needed, make_experts
from crossdock.location import make_expert_location, placement_maps
from crossdock.observe.recorder import RecorderMode, RecorderSpec, make_recorder
from crossdock.placement import make_eplb_algo, trivial_placement
from crossdock.placement_io.start import start_placement
from crossdock.rank_plan import RankPlan
from crossdock.types.dispatch import DispatcherSpec
from crossdock.types.experts import ExpertsSpec
from crossdock.types.layout import Layout
from crossdock.types.location import LoadRecorder, Picker, PickerSpec, PlacementMaps
from crossdock.types.model import MoeParts, MoeSpec
from crossdock.types.placement import Placement, Topology


def make_moe_parts(
    plan: RankPlan, moe: MoeSpec, comms: RankComms, dtype: torch.dtype, device: torch.device, in_flight: int
) -> MoeParts:
    """The parts for ``in_flight`` micro-batches, with the placement of ``eplb.init_location``.

    Raises:
        LoadFileError: ``eplb.init_location`` names a file that cannot be used.
        ConfigValueError: its placement has more replicas of an expert than ``eplb.max_replicas``.
        CapacityTooSmall: the dispatcher cannot take the rows that the limits allow.
        PluginError: a plugin declines.
    """
    num_local = plan.num_physical_experts // plan.sizes.moe_ep_size
    choice = plan.selection.plugin("experts")
    experts = make_experts(
        choice.name,
        choice.options,
        ExpertsSpec(
            hidden_size=moe.hidden_size,
            intermediate_size=moe.intermediate_size // plan.sizes.moe_tp_size,
            num_local_experts=num_local,
            top_k=moe.top_k,
            activation="silu",
            dtype=dtype,
            device=device,
            weight_dtype=moe.weight_dtype,
            row_invariant=plan.selection.row_invariant,
        ),
    )
    choice = plan.selection.plugin("dispatcher")
    dispatcher = make_dispatcher(
        choice.name,
        choice.options,
        DispatcherSpec(
            sizes=plan.sizes,
            place=plan.place,
            comms=comms,
            hidden_size=moe.hidden_size,
            top_k=moe.top_k,
            num_physical_experts=plan.num_physical_experts,
            dtype=dtype,
            device=device,
            max_rows_per_rank=max_rows_per_rank(plan, choice.capabilities.input_rows),
            max_decode_rows_per_rank=max_rows_per_rank(plan, choice.capabilities.input_rows, prefills=False),
            max_in_flight=in_flight,
            accepted_layouts=layouts_needed(experts.capabilities.layouts),
            expert_alignment=experts.capabilities.expert_alignment,
            wire_dtype=agreed_wire(choice.capabilities, experts.capabilities, moe.weight_dtype),
        ),
    )
    maps = placement_maps(
        _first_placement(plan, moe),
        device,
        max_replicas=plan.config.eplb.max_replicas,
    )
    capabilities = dispatcher.capabilities
    return MoeParts(
        dispatcher=dispatcher,
        experts=adapt_experts(experts, capabilities.layouts, num_local),
        picker=_make_picker(plan, moe, comms, maps, replicated_rows=capabilities.rank_invariant_picks_needed),
        maps=maps,
        recorder=_make_recorder(plan, maps, capabilities.input_rows),
        num_physical_experts=plan.num_physical_experts,
    )


def _make_picker(
    plan: RankPlan, moe: MoeSpec, comms: RankComms, maps: PlacementMaps, *, replicated_rows: bool
) -> Picker:
    choice = plan.selection.plugin("expert_location")
    spec = PickerSpec(
        maps=maps,
        topology=expert_topology(plan, moe),
        sizes=plan.sizes,
        place=plan.place,
        comms=comms,
        replicated_rows=replicated_rows,
        seed=plan.config.checkpoint.seed,
    )
    return make_expert_location(choice.name, choice.options, spec)


def _make_recorder(plan: RankPlan, maps: PlacementMaps, input_rows: Layout) -> LoadRecorder:
    """Balancing and reports need counts, also where nothing else is recorded; then the ring is as short as can be."""
    config = plan.config
    mode, buffer_steps = RecorderMode(config.recorder.mode), config.recorder.buffer_steps
    if mode is RecorderMode.OFF and (config.eplb.enabled or config.recorder.report != "off"):
        mode, buffer_steps = RecorderMode.STAT, 1
    return make_recorder(
        RecorderSpec(
            mode=mode,
            maps=maps,
            sizes=plan.sizes,
            place=plan.place,
            input_rows=input_rows,
            buffer_steps=buffer_steps,
        )
    )


def expert_topology(plan: RankPlan, moe: MoeSpec) -> Topology:
    """The ranks of the expert group as the GPUs of placements."""
    return Topology(
        num_gpus=plan.sizes.moe_ep_size,
        num_nodes=_nodes_of_experts(plan),
        num_physical_experts=plan.num_physical_experts,
        num_groups=moe.num_groups,
    )


def _first_placement(plan: RankPlan, moe: MoeSpec) -> Placement:
    """``eplb.init_location``: the same on all ranks, because planners are deterministic."""
    location, num_layers, num_experts = plan.config.eplb.init_location, len(moe.layers), moe.num_logical_experts
    if location == "trivial":
        return trivial_placement(num_layers, num_experts, plan.num_physical_experts)
    choice = plan.selection.plugin("eplb_algo")
    algo = make_eplb_algo(choice.name, choice.options)
    topology = expert_topology(plan, moe)
    first = start_placement(location, topology, algo, num_layers=num_layers, num_experts=num_experts)
    most, limit = int(first.replica_counts.max()), plan.config.eplb.max_replicas
    if limit and most > limit:
        raise ConfigValueError(
            [
                f"[eplb] max_replicas: the placement of init_location has an expert with {most} replicas and {limit} are allowed;"
                f" set it to {most} or more, or to 0 for no limit"
            ]
        )
    return first


def max_rows_per_rank(plan: RankPlan, input_rows: Layout, *, prefills: bool = True) -> int:
    """Most rows that this rank can bring to a dispatch; without ``prefills`` to one of a decode step."""
    limits = plan.config.scheduler
    return needed_rows_per_rank(
        RowLimits(max_step_tokens=limits.max_step_tokens, max_running_requests=limits.max_running_requests),
        input_rows,
        plan.sizes,
        prefills=prefills,
    )


def _nodes_of_experts(plan: RankPlan) -> int:
    """Machines that the expert group spans; 1 where its ranks do not divide over them."""
    nodes = plan.config.launch.nnodes
    return nodes if plan.sizes.moe_ep_size % nodes == 0 else 1
