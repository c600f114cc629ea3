"""When experts move: decides, plans beside the steps, moves layer by layer, and gives up together (DESIGN section 10).

::

    counting --interval--> planning --plan is good--> moving --layer staged everywhere--> switch, next layer --> counting
        ^                     |                         |
        `-- not worth it -----'------ a rank failed, or is late: the layer keeps its old placement -----'

Advanced once a step on all ranks. Every transition follows from counts that are equal on all ranks, or from a vote.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, MutableMapping

import attrs
import torch

from crossdock.engine_seams import AgreedStep
from crossdock.eplb.background import Background
from crossdock.eplb.ballot import Ballot, Vote
from crossdock.eplb.history import RebalanceLog, RebalanceProgress
from crossdock.eplb.jobs import MovingJob, PlanningJob
from crossdock.eplb.live_placement import LivePlacement
from crossdock.eplb.load_segments import LoadSegments
from crossdock.eplb.plan_work import PlannedMove, PlanningWork
from crossdock.eplb.prediction import Rates
from crossdock.eplb.settings import EplbSettings
from crossdock.eplb.transfer import SliceCarrier
from crossdock.errors import CrossdockError, RuntimeFault
from crossdock.recorder_window import balancedness_of
from crossdock.types.comm import GroupComm
from crossdock.types.placement import EplbAlgo, ExpertLoad, Placement
from crossdock.types.rebalance import RebalanceFacts, RebalancePolicy

IDLE_WAIT_S = 0.001
"""While nobody has rows, a rank waits so long for its transfer or plan before it votes again."""
_FIRST_COPY_BYTES_PER_S = 2e9
"""Assumed until a switch was timed."""


@attrs.define(kw_only=True, eq=False)
class EplbManager:
    """``BetweenSteps`` on one rank; the first rank plans."""

    settings: EplbSettings
    live: LivePlacement
    segments: LoadSegments
    algo: EplbAlgo
    policy: RebalancePolicy
    policy_needs_plan: bool
    carrier: SliceCarrier
    world: GroupComm
    """For tensors on the device."""
    host_world: GroupComm
    log: RebalanceLog
    gauges: MutableMapping[str, float]
    clock: Callable[[], float] = time.monotonic
    _job: PlanningJob | MovingJob | None = attrs.field(default=None, init=False)
    _must_renew: bool = attrs.field(default=False, init=False)
    _step_s: float = attrs.field(default=0.0, init=False)
    _step: int = attrs.field(default=0, init=False)
    _began: float = attrs.field(default=0.0, init=False)
    """When the step thread came here last."""
    _last_end: float | None = attrs.field(default=None, init=False)
    _copy_bytes_per_s: float = attrs.field(default=_FIRST_COPY_BYTES_PER_S, init=False)

    @property
    def is_busy(self) -> bool:
        """A rebalance is under way: ranks must not park."""
        return self._job is not None

    @property
    def progress(self) -> RebalanceProgress | None:
        """Of the rebalance under way."""
        return None if self._job is None else self._job.progress

    def after_step(self, agreed: AgreedStep) -> None:
        """One move of the state machine. Never waits for a transfer or a plan while there is work."""
        self._began = self.clock()
        self._step = agreed.plan.step
        self._time_steps(agreed, self._began)
        if self._job is not None:
            self._advance(agreed)
        elif self.segments.num_passes >= self.settings.interval:
            self._decide()
        ended = self.clock()
        if self._job is not None:
            self._job.progress.paused(ended - self._began)
        self._last_end = ended if agreed.has_rows else None

    def apply(self, new: Placement, reason: str) -> None:
        """Starts to move to ``new``; every rank calls it between the same two steps.

        Raises:
            RuntimeFault: a rebalance is under way; the one that was asked for is not queued.
            InvalidPlacement: it does not fit.
        """
        if self._job is not None:
            raise RuntimeFault(
                f"a rebalance is under way ({self._job.progress.describe()}); ask again when it has ended, see /placement"
            )
        self._began = self.clock()
        self.live.check(new)
        self._move(new, RebalanceProgress(step=self._step, reason=reason))

    # -- decide

    def _time_steps(self, agreed: AgreedStep, now: float) -> None:
        """Smoothed duration of steps with rows that follow one another."""
        if agreed.has_rows and self._last_end is not None:
            taken = now - self._last_end
            self._step_s = taken if not self._step_s else 0.9 * self._step_s + 0.1 * taken

    def _decide(self) -> None:
        """Asks the policy; plans where it says so or wants a plan first."""
        counts, by_rank = self.segments.totals(self.world)
        facts = RebalanceFacts(
            steps_since_last=self.segments.num_passes,
            balancedness=float(balancedness_of(by_rank).mean()) if bool(by_rank.any()) else None,
        )
        self.segments.clear()
        self.gauges["eplb_balancedness"] = 1.0 if facts.balancedness is None else facts.balancedness
        progress = RebalanceProgress(step=self._step, reason="", facts=facts)
        if not self.policy_needs_plan and not self._wants(facts, progress):
            return
        plan = self._start_planning(counts) if self.host_world.rank == 0 else None
        self._job = PlanningJob(progress=progress, plan=plan, deadline=self.clock() + self.settings.late_s)

    def _wants(self, facts: RebalanceFacts, progress: RebalanceProgress) -> bool:
        decision = self.policy.choose(facts)
        progress.reason = decision.reason
        if not decision.rebalance:
            self.log.add(progress, "refused")
        return decision.rebalance

    def _start_planning(self, counts: torch.Tensor) -> Background[PlannedMove]:
        """A thread with its own copies of everything that it reads."""
        settings = self.settings
        work = PlanningWork(
            algo=self.algo,
            load=ExpertLoad(counts=counts.numpy()),
            topology=self.live.topology,
            current=self.live.placement(),
            slot_bytes=self.live.spare.slot_bytes,
            passes_to_next=settings.interval,
            rates=Rates(
                step_s=self._step_s,
                expert_share=settings.expert_share,
                link_bytes_per_s=settings.link_gbps * 1e9 / 8,
                copy_bytes_per_s=self._copy_bytes_per_s,
            ),
        )
        return Background(work.run).start("expert planner")

    # -- advance

    def _advance(self, agreed: AgreedStep) -> None:
        job = self._job
        assert job is not None, "called with a job only"
        if isinstance(job, MovingJob) and job.groups:
            self._switch_group(job)
            return
        vote, problem = job.vote(self.clock())
        if vote is Vote.BUSY and not agreed.has_rows:
            job.wait_briefly(IDLE_WAIT_S)
        ballot = Ballot(world=self.host_world)
        votes = ballot.cast(vote, agreed.plan.eplb_pass)
        if Vote.FAILED in votes or Vote.LATE in votes:
            self._give_up(job, ballot.reason(votes, problem))
        elif all(each is Vote.DONE for each in votes):
            if isinstance(job, PlanningJob):
                self._take_plan(job)
            else:
                job.start_switch()
                self._switch_group(job)

    def _give_up(self, job: PlanningJob | MovingJob, why: str) -> None:
        """All ranks together: the layer under way keeps its placement, and a later decision tries again."""
        if isinstance(job, MovingJob):
            job.give_up()
            self.carrier.abandon()
            self._must_renew = True
        job.progress.reason = f"{job.progress.reason}; given up: {why}" if job.progress.reason else why
        self._end(job.progress, "rolled_back")

    def _take_plan(self, job: PlanningJob) -> None:
        """The first rank's plan becomes everybody's; all judge it alike."""
        self._job = None
        placement = job.share(self.host_world, self.live)
        progress, facts = job.progress, job.progress.facts
        assert facts is not None, "planning follows a decision"
        if self.policy_needs_plan:
            facts = attrs.evolve(facts, predicted_gain_s=progress.gain_s, price_s=progress.price_s)
            if not self._wants(facts, progress):
                return
        try:
            self.live.check(placement)
        except CrossdockError as error:
            progress.reason = f"{progress.reason}; the plan cannot be used: {error}"
            self._end(progress, "refused")
            return
        self._move(placement, progress)

    # -- move

    def _move(self, new: Placement, progress: RebalanceProgress) -> None:
        if self._must_renew:
            self.carrier.renew()
            self._must_renew = False
        rows = self.live.changed_layers(new)
        progress.num_layers = len(rows)
        job = MovingJob(
            progress=progress,
            placement=new,
            live=self.live,
            carrier=self.carrier,
            settings=self.settings,
            rows=deque(rows),
        )
        self._next_layer(job)

    def _next_layer(self, job: MovingJob) -> None:
        if not job.rows:
            self._end(job.progress, "applied")
            return
        job.start_layer(self.clock())
        self._job = job

    def _switch_group(self, job: MovingJob) -> None:
        """One group of slots; with the last one the layer has switched. All ranks have the same groups, so nobody votes."""
        assert job.transfer is not None, "a layer that switches was staged"
        plan, slot_bytes = job.transfer.plan, self.live.spare.slot_bytes
        group = job.groups.popleft()
        copied_s = self.live.switch(plan, group)
        own = sum(slot // self.live.topology.slots_per_gpu == self.live.ep_rank for slot in group)
        if own and copied_s > 0:
            self._copy_bytes_per_s = own * slot_bytes / copied_s
        if not job.groups:
            job.progress.layer_done(plan.moves, slot_bytes * self.live.expert_shards)
            job.rows.popleft()
            self._next_layer(job)

    def _end(self, progress: RebalanceProgress, outcome: str) -> None:
        self._job = None
        self.segments.clear()
        progress.paused(self.clock() - self._began)
        self.log.add(progress, outcome)
