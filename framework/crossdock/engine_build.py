"""From a rank's plan to its running step loop: agreement, weights, warm-up, engine; and what happens when a rank fails."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import torch

from crossdock.agreement import agreement_fields, check_agreement
from crossdock.comm import RankComms
from crossdock.control_verbs import ControlVerbs
from crossdock.engine import RankEngine
from crossdock.engine_seams import LogitSink, StepSync
from crossdock.eplb.build import LiveBalancing, make_live_balancing
from crossdock.errors import CrossdockError, RankLost, RuntimeFault
from crossdock.groups import leader_rank
from crossdock.host_memory import bound_kernel_caches, keep_freed_memory, set_aside_built_objects
from crossdock.kv_cache import BlockPool
from crossdock.lost_rank import is_broken_collective, limit_collectives, named
from crossdock.moe_build import max_rows_per_rank
from crossdock.observe.observers import make_observers
from crossdock.observe.receipt import ReceiptCounters, make_receipt
from crossdock.observe.recorder import RecorderMode
from crossdock.observe.timeline import Timeline, clock_of
from crossdock.overlap_gate import OverlapGate
from crossdock.profile_verbs import ProfileVerbs
from crossdock.rank_plan import RankPlan, step_depth
from crossdock.recorder_verbs import RecorderVerbs
from crossdock.runner_build import BuiltRunner, build_runner
from crossdock.scheduled import SchedulerLimits
from crossdock.scheduler import Scheduler
from crossdock.step_rules import step_rules
from crossdock.step_sync import open_step_sync
from crossdock.step_totals import StepTotalsCounter
from crossdock.types.link import RankLink, Ready
from crossdock.types.observer import Observer, ObserverSpec
from crossdock.warm_up import warm_up

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_CPU = torch.device("cpu")


def run_rank(plan: RankPlan, comms: RankComms, link: RankLink, *, store: Store | None = None) -> None:
    """A rank of a server from start to stop: builds, reports ``Ready``, runs the loop. Collective.

    Args:
        plan: what this rank is.
        comms: its groups.
        link: its channel to the frontend.
        store: where the ranks met; None for a job of one rank.

    Raises:
        CrossdockError: why the rank ends; ranks that wait for this one were released with the same reason.
    """
    keep_freed_memory()
    bound_kernel_caches()
    with build_engine(plan, comms, link, store=store) as engine:
        set_aside_built_objects()
        link.send(Ready(rank=plan.place.rank, receipt=make_receipt(plan.config, plan.selection, engine.counters)))
        engine.run()


@contextmanager
def build_engine(
    plan: RankPlan,
    comms: RankComms,
    link: RankLink,
    *,
    store: Store | None = None,
    on_prompt_logits: LogitSink | None = None,
) -> Generator[RankEngine]:
    """The engine of a rank, warmed up; what it shares with other ranks is closed when the block is left. Collective.

    Raises:
        AgreementError: ranks were started with different plugins, options or versions.
        CheckpointError, ConfigError, PluginError: as ``build_runner``.
    """
    with _naming_lost_ranks(plan, store):
        check_agreement(agreement_fields(plan.selection), comms.host.world, _CPU)
        device = torch.device("cuda", torch.cuda.current_device()) if plan.selection.device == "cuda" else _CPU
        built = build_runner(plan, comms, device)
        warm_up(built.runner, plan)
        counters, observers, gauges = _counters(plan, built), _observers(plan), dict[str, float]()
        timeline = built.runner.timeline = Timeline(rank=plan.place.rank, clock=clock_of(device))
        overlap = _overlap_gate(plan, timeline, gauges)
        balancing = make_live_balancing(
            plan,
            comms,
            built.model,
            built.moe,
            built.recorder,
            built.spare,
            counters=counters,
            observers=observers,
            gauges=gauges,
        )
        with open_step_sync(plan, step_rules(plan), comms, store) as sync:
            leads = plan.place.rank == leader_rank(plan.sizes, plan.place.attn_dp_rank)
            scheduler = make_scheduler(plan, built.kv.plan.num_pages) if leads else None
            totals = StepTotalsCounter(attn_dp_rank=plan.place.attn_dp_rank)
            actors = (totals, *balancing.actors)
            engine = RankEngine(
                place=plan.place,
                link=link,
                sync=sync,
                runner=built.runner,
                scheduler=scheduler,
                depth=step_depth(plan),
                verbs=_verbs(plan, built, comms, scheduler, counters, balancing),
                counters=counters,
                observers=observers,
                between_steps=actors,
                gauges=gauges,
                totals=totals,
                overlap=overlap,
                timeline=timeline,
                on_prompt_logits=on_prompt_logits,
            )
            if store is not None:
                limit_collectives(comms, plan.config.launch.step_deadline_s)
            try:
                with _told_reasons(plan, sync), _naming_lost_ranks(plan, store):
                    yield engine
            finally:
                balancing.close()


@contextmanager
def _naming_lost_ranks(plan: RankPlan, store: Store | None) -> Generator[None]:
    """When a collective breaks in the block, the error gets the name of the rank that is gone."""
    try:
        yield
    except RankLost as error:
        if store is None or not is_broken_collective(error):
            raise
        raise named(error, store, plan.place.rank, plan.sizes.ranks) from error.__cause__


@contextmanager
def _told_reasons(plan: RankPlan, sync: StepSync) -> Generator[None]:
    """When the block fails, the ranks that wait for this one learn why."""
    rank = plan.place.rank
    try:
        yield
    except CrossdockError as error:
        sync.abort(f"rank {rank} ended: {error}")
        raise
    except Exception as error:
        reason = f"rank {rank} failed with {type(error).__name__}: {error}".partition("\n")[0]
        sync.abort(reason)
        raise RuntimeFault(reason) from error


def make_scheduler(plan: RankPlan, num_pages: int) -> Scheduler:
    """The scheduler of this rank's replica."""
    limits = plan.config.scheduler
    return Scheduler(
        SchedulerLimits(
            max_running_requests=limits.max_running_requests,
            max_step_tokens=limits.max_step_tokens,
            chunk_tokens=limits.chunk_tokens,
            max_sequence_tokens=plan.max_sequence_tokens,
            max_queued_requests=limits.max_queued_requests,
            vocab_size=plan.info.vocab_size,
        ),
        BlockPool(num_pages, limits.page_tokens, keep_prefixes=limits.prefix_cache),
        plan.info.eos_token_ids,
        depth=step_depth(plan),
    )


def _overlap_gate(plan: RankPlan, timeline: Timeline, gauges: dict[str, float]) -> OverlapGate | None:
    strategy = plan.selection.plugin("strategy").capabilities
    if strategy.micro_batches == 1:
        return None
    return OverlapGate(limits=strategy.overlap, timeline=timeline, gauges=gauges)


def _observers(plan: RankPlan) -> tuple[Observer, ...]:
    chosen = plan.selection.observers
    spec = ObserverSpec(rank=plan.place.rank, attn_dp_rank=plan.place.attn_dp_rank, num_ranks=plan.sizes.ranks)
    return make_observers([one.name for one in chosen], {one.name: one.options for one in chosen}, spec)


def _counters(plan: RankPlan, built: BuiltRunner) -> ReceiptCounters:
    counters = ReceiptCounters()
    counters.set_capacity("kv_tokens", built.kv.plan.usable_tokens)
    counters.set_capacity("kv_bytes", built.kv.plan.total_bytes)
    counters.set_capacity("planned_bytes", built.memory.needed_bytes)
    counters.set_capacity("max_sequence_tokens", plan.max_sequence_tokens)
    if built.moe is not None:
        rows = max_rows_per_rank(plan, built.moe.dispatcher.capabilities.input_rows)
        counters.set_capacity("dispatcher_rows_per_rank", rows)
    return counters


def _verbs(
    plan: RankPlan,
    built: BuiltRunner,
    comms: RankComms,
    scheduler: Scheduler | None,
    counters: ReceiptCounters,
    balancing: LiveBalancing,
) -> ControlVerbs:
    def flush_cache(arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {"flushed_pages": 0 if scheduler is None else scheduler.pool.flush()}

    def receipt(arguments: Mapping[str, Any]) -> dict[str, Any]:
        return make_receipt(plan.config, plan.selection, counters)

    def server_info(arguments: Mapping[str, Any]) -> dict[str, Any]:
        if scheduler is None:
            return {}
        usage = scheduler.pool.usage()
        return {
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "preemptions": scheduler.num_preemptions,
            "kv_pages": attrs.asdict(usage),
            "kv_tokens": built.kv.plan.usable_tokens,
        }

    mode = RecorderMode(plan.config.recorder.mode)
    recorder = RecorderVerbs(
        # Balancing counts without a recorder of the user's.
        recorder=None if mode is RecorderMode.OFF else built.recorder,
        mode=mode,
        maps=None if built.moe is None else built.moe.maps,
        layers=() if plan.info.moe is None else plan.info.moe.layers,
        world=comms.world,
        rank=plan.place.rank,
    )
    assert built.runner.timeline is not None, "it is made before the verbs"
    profile = ProfileVerbs(timeline=built.runner.timeline, place=plan.place, sizes=plan.sizes)
    placement = balancing.verbs
    return ControlVerbs(
        local={
            "flush_cache": flush_cache,
            "receipt": receipt,
            "server_info": server_info,
            **({} if placement is None else placement.local()),
        },
        together={**recorder.verbs(), **profile.verbs(), **({} if placement is None else placement.together())},
    )
