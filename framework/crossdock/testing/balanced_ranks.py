"""Offline jobs whose ranks balance experts, with what became of each rebalance: for tests that compare their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from crossdock.engine import RankEngine
from crossdock.engine_build import build_engine
from crossdock.eplb.manager import EplbManager
from crossdock.groups import leader_ranks
from crossdock.observe.receipt import RebalanceEntry
from crossdock.offline_job import OfflineJob, OfflineResult, PromptLogits
from crossdock.offline_link import OfflineLink
from crossdock.testing.engine_ranks import plan_on
from crossdock.types.link import AddRequests, Incoming, Stop

if TYPE_CHECKING:
    from crossdock.testing.world import RankContext, RankPool
    from crossdock.types.request import EngineRequest


@attrs.frozen(kw_only=True, eq=False)
class BalancedResult:
    """One rank's part of a job, or all of them joined."""

    result: OfflineResult
    rebalances: tuple[RebalanceEntry, ...]
    capacity: Mapping[str, int]
    gauges: Mapping[str, float]


@attrs.define(eq=False)
class GatedLink(OfflineLink):
    """Sends every second request only when a rebalance has ended, so that answers from before and after one are compared."""

    may_go_on: Callable[[bool], bool] = lambda is_half_done: True
    _held: tuple[EngineRequest, ...] = attrs.field(default=(), init=False)

    def poll(self, timeout_s: float | None) -> Sequence[Incoming]:
        if not self._is_started:
            self._is_started = True
            self._open = {request.rid for request in self.requests}
            self._held = tuple(self.requests[1::2])
            return (AddRequests(requests=tuple(self.requests[::2])),) if self.requests else ()
        held = {request.rid for request in self._held}
        if held and self.may_go_on(self._open == held):
            released, self._held = self._held, ()
            return (AddRequests(requests=released),)
        return () if self._open else (Stop(),)


def has_settled(engine: RankEngine, is_half_done: bool) -> bool:
    """No rebalance is under way, and one has ended or none can come; True at once where nothing balances."""
    managers = [actor for actor in engine.between_steps if isinstance(actor, EplbManager)]
    if not managers:
        return True
    return not managers[0].is_busy and (bool(engine.counters.rebalances) or is_half_done)


def balanced_job_on_rank(context: RankContext, job: OfflineJob) -> BalancedResult:
    """Call it through ``RankPool.run``."""
    plan = plan_on(context, job.config)
    is_leader = plan.place.rank in leader_ranks(plan.sizes)
    requests = job.requests(plan.place.attn_dp_rank, plan.sizes.attn_dp_size) if is_leader else []
    link, sink = GatedLink(requests), PromptLogits(requests)
    with build_engine(
        plan, context.comms_of(plan.sizes), link, on_prompt_logits=sink if job.keeps_logits else None
    ) as engine:
        link.may_go_on = lambda is_half_done: has_settled(engine, is_half_done)
        engine.run()
    return BalancedResult(
        result=OfflineResult(outputs=link.outputs, logits=sink.arrays),
        rebalances=tuple(engine.counters.rebalances),
        capacity=dict(engine.counters.capacity),
        gauges=dict(engine.gauges),
    )


def run_balanced(pool: RankPool, job: OfflineJob, timeout_s: float = 90.0) -> BalancedResult:
    """Results of all ranks, which must tell the same story of their rebalances."""
    parts: list[BalancedResult] = pool.run(balanced_job_on_rank, job, timeout_s=timeout_s)
    stories = [[_told(entry) for entry in part.rebalances] for part in parts]
    assert all(story == stories[0] for story in stories), "ranks tell different stories of their rebalances"
    outputs = {rid: outputs for part in parts for rid, outputs in part.result.outputs.items()}
    logits = {rid: array for part in parts for rid, array in part.result.logits.items()}
    return BalancedResult(
        result=OfflineResult(outputs=outputs, logits=logits),
        rebalances=parts[0].rebalances,
        capacity=parts[0].capacity,
        gauges=parts[0].gauges,
    )


def _told(entry: RebalanceEntry) -> dict[str, Any]:
    """Everything but the pause, which each rank measures for itself."""
    return {name: value for name, value in attrs.asdict(entry).items() if name != "stalled_s"}
