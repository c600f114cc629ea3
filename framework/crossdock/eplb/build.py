"""Puts live balancing of one rank together, from its plan and what was built for it."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping, Sequence

import attrs
import torch

from crossdock.comm import RankComms
from crossdock.engine_seams import BetweenSteps
from crossdock.eplb.desk_process import ProcessDesk
from crossdock.eplb.desk_thread import ThreadDesk
from crossdock.eplb.history import RebalanceLog
from crossdock.eplb.live_placement import LivePlacement, make_canaries
from crossdock.eplb.load_report import LoadReport
from crossdock.eplb.load_segments import LoadSegments
from crossdock.eplb.manager import EplbManager
from crossdock.eplb.orders import PlanningDesk
from crossdock.eplb.reload import ExpertReload
from crossdock.eplb.settings import EplbSettings
from crossdock.eplb.spare_slots import SpareSlots, moved_tensors, slot_bytes
from crossdock.eplb.transfer import SliceCarrier
from crossdock.eplb.transfer_peer import shareable_memory
from crossdock.eplb.transport import make_ballot, make_carrier, voting_group, writes_to_peers
from crossdock.eplb.verbs import PlacementVerbs
from crossdock.errors import ConfigValueError
from crossdock.moe_build import expert_topology
from crossdock.observe.receipt import ReceiptCounters
from crossdock.observe.recorder import ExpertLoadRecorder
from crossdock.observe.recorder_window import LoadWindow
from crossdock.placement import make_eplb_algo
from crossdock.rank_plan import RankPlan
from crossdock.rebalance import make_rebalance_policy
from crossdock.types.capability import RebalancePolicyCapabilities
from crossdock.types.experts import ExpertTensors
from crossdock.types.model import ExpertReader, Model, MoeParts
from crossdock.types.observer import Observer
from crossdock.types.placement import Topology

SWITCH_INTERVAL_S = 2e-4


@attrs.frozen(kw_only=True, eq=False)
class LiveBalancing:
    """What the engine gets: actors between steps, verbs, and what to close at the end."""

    actors: tuple[BetweenSteps, ...] = ()
    verbs: PlacementVerbs | None = None
    """None for a dense model."""
    carrier: SliceCarrier | None = None
    desk: PlanningDesk | None = None

    def close(self) -> None:
        for part in (self.carrier, self.desk):
            if part is not None:
                part.close()


def make_spare_slots(plan: RankPlan, model: Model) -> SpareSlots | None:
    """Room for one layer on its way, part of the memory plan; None where experts do not move.

    Raises:
        ConfigValueError: ``eplb.enabled`` for a model without experts.
    """
    if not plan.config.eplb.enabled:
        return None
    tensors = model.expert_tensors()
    if plan.info.moe is None or not tensors:
        raise ConfigValueError(
            [f"[eplb] enabled: {plan.info.model_type} has no routed experts; set eplb.enabled to false"]
        )
    layers = [moved_tensors(layer, _canary_form(plan, layer)) for layer in tensors]
    if not writes_to_peers(plan):
        return SpareSlots(layers)
    return SpareSlots(layers, shareable_memory(next(iter(layers[0].values())).device))


def make_live_balancing(
    plan: RankPlan,
    comms: RankComms,
    model: Model,
    moe: MoeParts | None,
    recorder: ExpertLoadRecorder | None,
    spare: SpareSlots | None,
    *,
    counters: ReceiptCounters,
    observers: Sequence[Observer],
    gauges: MutableMapping[str, float],
) -> LiveBalancing:
    """Collective where experts move: every rank calls it.

    Raises:
        PluginError: planner or policy cannot be built.
    """
    if moe is None or plan.info.moe is None:
        return LiveBalancing()
    topology = expert_topology(plan, plan.info.moe)
    tensors = model.expert_tensors()
    expert_bytes = slot_bytes(tensors[0].tensors)
    counters.set_capacity("expert_bytes", expert_bytes)
    actors: list[BetweenSteps] = []
    if plan.config.recorder.report != "off" and recorder is not None:
        actors.append(_load_report(plan, comms, recorder, topology, moe, observers, gauges))
    verbs = PlacementVerbs(
        maps=moe.maps,
        topology=topology,
        layers=plan.info.moe.layers,
        expert_bytes=expert_bytes,
        world=comms.world,
        expert_reload=_expert_reload(plan, model, moe),
    )
    if spare is None or recorder is None:
        return LiveBalancing(actors=tuple(actors), verbs=verbs)
    counters.set_capacity("eplb_spare_bytes", spare.total_bytes)
    carrier = make_carrier(plan, comms, spare)
    segments = LoadSegments(moe.maps, topology.num_gpus, plan.config.eplb.interval)
    # Once now: NCCL connects at the first use of a collective, which took a tenth of a second of a step.
    segments.totals(comms.world)
    desk, host_world = _desk(plan), voting_group(plan, comms)
    # Planner and transfers run beside the step thread, which must not wait long for them to hand over the interpreter.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    recorder.add_sink(segments)
    manager = EplbManager(
        settings=_settings(plan),
        live=_live(plan, moe, tensors, recorder, spare, topology, _reader(plan, model)),
        segments=segments,
        desk=desk,
        policy=make_rebalance_policy(*_choice(plan, "rebalance_policy")),
        policy_needs_plan=_needs_plan(plan),
        carrier=carrier,
        world=comms.world,
        host_world=host_world,
        ballot=make_ballot(host_world),
        log=RebalanceLog(rank=plan.place.rank, counters=counters, observers=observers, gauges=gauges),
        gauges=gauges,
    )
    verbs = attrs.evolve(verbs, manager=manager, segments=segments)
    return LiveBalancing(actors=(*actors, manager), verbs=verbs, carrier=carrier, desk=desk)


def _live(
    plan: RankPlan,
    moe: MoeParts,
    tensors: Sequence[ExpertTensors],
    recorder: ExpertLoadRecorder,
    spare: SpareSlots,
    topology: Topology,
    reader: ExpertReader | None,
) -> LivePlacement:
    place = plan.place
    canaries = make_canaries(moe.maps, place.moe_ep_rank, topology.slots_per_gpu) if plan.config.eplb.canary else ()
    return LivePlacement(
        topology=topology,
        maps=moe.maps,
        tensors=tensors,
        experts=moe.experts,
        picker=moe.picker,
        counters=recorder,
        ep_rank=place.moe_ep_rank,
        spare=spare,
        expert_shards=plan.sizes.moe_tp_size,
        reader=reader,
        canaries=canaries,
    )


def _load_report(
    plan: RankPlan,
    comms: RankComms,
    recorder: ExpertLoadRecorder,
    topology: Topology,
    moe: MoeParts,
    observers: Sequence[Observer],
    gauges: MutableMapping[str, float],
) -> LoadReport:
    report = plan.config.recorder.report
    assert report != "off", "the caller looked"
    num_layers, num_physical = moe.maps.physical_to_logical.shape
    window = LoadWindow(num_layers, num_physical, topology.num_gpus, moe.maps.physical_to_logical.device)
    recorder.add_sink(window)
    return LoadReport(
        window=window,
        world=comms.world,
        report=report,
        every=plan.config.recorder.report_every,
        gauges=gauges,
        observers=observers,
    )


def _reader(plan: RankPlan, model: Model) -> ExpertReader | None:
    """Where ``eplb.experts_from`` says so."""
    if plan.config.eplb.experts_from == "peers":
        return None
    if not isinstance(model, ExpertReader):
        raise ConfigValueError(
            [f"[eplb] experts_from: {plan.info.model_type} cannot read single experts again; set it to peers"]
        )
    return model


def _expert_reload(plan: RankPlan, model: Model, moe: MoeParts) -> ExpertReload | None:
    if not isinstance(model, ExpertReader):
        return None
    return ExpertReload(
        reader=model,
        maps=moe.maps,
        tensors=model.expert_tensors(),
        experts=moe.experts,
        ep_rank=plan.place.moe_ep_rank,
    )


def _desk(plan: RankPlan) -> PlanningDesk:
    name, options = _choice(plan, "eplb_algo")
    place, device = plan.config.eplb.plan_in, plan.config.launch.device
    if place == "process" or (place == "auto" and device == "cuda"):
        return ProcessDesk(name, options)
    return ThreadDesk(make_eplb_algo(name, options))


def _settings(plan: RankPlan) -> EplbSettings:
    eplb = plan.config.eplb
    return EplbSettings(
        interval=eplb.interval,
        max_step_bytes=eplb.max_step_bytes,
        late_s=eplb.late_s,
        expert_share=eplb.expert_share,
        link_gbps=eplb.link_gbps,
    )


def _choice(plan: RankPlan, point: str) -> tuple[str, dict[str, object]]:
    choice = plan.selection.plugin(point)
    return choice.name, dict(choice.options)


def _needs_plan(plan: RankPlan) -> bool:
    capabilities = plan.selection.plugin("rebalance_policy").capabilities
    return isinstance(capabilities, RebalancePolicyCapabilities) and capabilities.needs_plan


def _canary_form(plan: RankPlan, layer: ExpertTensors) -> torch.Tensor | None:
    """A tensor of the shape and type of a layer's canary."""
    if not plan.config.eplb.canary:
        return None
    device = next(iter(layer.tensors.values())).device
    return torch.empty(layer.num_slots, dtype=torch.int64, device=device)
