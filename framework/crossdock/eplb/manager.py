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

from crossdock.engine_seams import AgreedStep
from crossdock.eplb.ballot import Ballot, Vote
from crossdock.eplb.history import RebalanceLog, RebalanceProgress
from crossdock.eplb.jobs import CountingJob, MovingJob, PlanningJob
from crossdock.eplb.live_placement import LivePlacement
from crossdock.eplb.load_segments import LoadSegments
from crossdock.eplb.measured_rates import MeasuredRates
from crossdock.eplb.orders import PlanningDesk
from crossdock.eplb.settings import EplbSettings
from crossdock.eplb.transfer import SliceCarrier
from crossdock.errors import CrossdockError, RuntimeFault
from crossdock.observe.recorder_window import balancedness_of
from crossdock.types.comm import GroupComm
from crossdock.types.placement import Placement
from crossdock.types.rebalance import RebalanceFacts, RebalancePolicy

IDLE_WAIT_S = 0.001
"""While nobody has rows, a rank waits so long for its transfer or plan before it votes again."""


@attrs.define(kw_only=True, eq=False)
class EplbManager:
    """``BetweenSteps`` on one rank; the first rank plans."""

    settings: EplbSettings
    live: LivePlacement
    segments: LoadSegments
    desk: PlanningDesk
    policy: RebalancePolicy
    policy_needs_plan: bool
    carrier: SliceCarrier
    world: GroupComm
    """For tensors on the device."""
    host_world: GroupComm
    ballot: Ballot
    log: RebalanceLog
    gauges: MutableMapping[str, float]
    clock: Callable[[], float] = time.monotonic
    _job: CountingJob | PlanningJob | MovingJob | None = attrs.field(default=None, init=False)
    _must_renew: bool = attrs.field(default=False, init=False)
    _measured: MeasuredRates = attrs.field(
        default=attrs.Factory(lambda self: MeasuredRates(self.settings), takes_self=True), init=False
    )
    _step: int = attrs.field(default=0, init=False)
    _began: float = attrs.field(default=0.0, init=False)
    """When the step thread came here last."""

    @property
    def is_busy(self) -> bool:
        """A rebalance is under way: ranks must not park."""
        return self._job is not None

    @property
    def progress(self) -> RebalanceProgress | None:
        """Of the rebalance under way."""
        return None if self._job is None else self._job.progress

    @property
    def activity(self) -> str:
        """What comes next: idle, counting, planning, preparing, staging or switching."""
        return "idle" if self._job is None else self._job.activity

    def after_step(self, agreed: AgreedStep) -> None:
        """One move of the state machine. Never waits for a transfer or a plan while there is work."""
        self._began = self.clock()
        self._step = agreed.plan.step
        self._measured.step_ended(self._began, has_rows=agreed.has_rows)
        if self._job is not None:
            self._advance(self._job, agreed)
        elif self.segments.num_passes >= self.settings.interval:
            self._count()
        ended = self.clock()
        if self._job is not None:
            self._job.progress.paused(ended - self._began)
        self._measured.next_begins(ended, has_rows=agreed.has_rows)

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

    def _count(self) -> None:
        """Asks for everybody's counts; decides at once where they are there."""
        job = CountingJob(
            progress=RebalanceProgress(step=self._step, reason=""),
            pending=self.segments.start_totals(self.world),
            num_passes=self.segments.num_passes,
            deadline=self.clock() + self.settings.late_s,
        )
        self.segments.clear()
        if job.pending.arrived is None:
            self._decide(job)
        else:
            self._job = job

    def _decide(self, job: CountingJob) -> None:
        """Asks the policy; plans where it says so or wants a plan first."""
        self._job = None
        totals, progress = job.pending.take(), job.progress
        balancedness = float(balancedness_of(totals.by_rank).mean()) if bool(totals.by_rank.any()) else None
        facts = progress.facts = RebalanceFacts(steps_since_last=job.num_passes, balancedness=balancedness)
        self.gauges["eplb_balancedness"] = 1.0 if balancedness is None else balancedness
        if not self.policy_needs_plan and not self._wants(facts, progress):
            return
        plan = None
        if self.host_world.rank == 0:
            passes, rates = self.settings.interval, self._measured.rates()
            plan = self.desk.plan(self.live.plan_order(totals.counts, passes_to_next=passes, rates=rates))
        self._job = PlanningJob(progress=progress, plan=plan, deadline=self.clock() + self.settings.late_s)

    def _wants(self, facts: RebalanceFacts, progress: RebalanceProgress) -> bool:
        decision = self.policy.choose(facts)
        progress.reason = decision.reason
        if not decision.rebalance:
            self.log.add(progress, "refused")
        return decision.rebalance

    # -- advance

    def _advance(self, job: CountingJob | PlanningJob | MovingJob, agreed: AgreedStep) -> None:
        # All ranks come here in the same step: nobody votes.
        if isinstance(job, MovingJob) and job.groups:
            self._switch_group(job)
            return
        if isinstance(job, PlanningJob) and job.slots is not None:
            self._take_plan(job)
            return
        vote, problem = job.vote(self.clock())
        if vote is Vote.BUSY and not agreed.has_rows:
            job.wait_briefly(IDLE_WAIT_S)
        votes = self.ballot.cast(vote, agreed.plan.eplb_pass) or (Vote.BUSY,)
        has_failed = Vote.FAILED in votes or Vote.LATE in votes
        if Vote.BUSY in votes and not has_failed:
            return
        self.ballot.decided()
        if has_failed:
            self._give_up(job, self.ballot.reason(votes, problem))
        elif isinstance(job, CountingJob):
            self._decide(job)
        elif isinstance(job, PlanningJob):
            job.share(self.host_world, self.live)
        else:
            job.next_phase()

    def _give_up(self, job: CountingJob | PlanningJob | MovingJob, why: str) -> None:
        """All ranks together: the layer under way keeps its placement, and a later decision tries again."""
        self.desk.abandon()
        if isinstance(job, MovingJob):
            job.give_up()
            self.carrier.abandon()
            self._must_renew = True
        job.progress.reason = f"{job.progress.reason}; given up: {why}" if job.progress.reason else why
        self._end(job.progress, "rolled_back")

    def _take_plan(self, job: PlanningJob) -> None:
        """The first rank's plan is everybody's; all judge it alike."""
        self._job = None
        placement = job.placement(self.live.maps.replica_counts.shape[1])
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
        # What wrote to live slots so far, a reload for instance, comes before what reads them.
        self.carrier.release()
        rows = self.live.changed_layers(new)
        progress.num_layers = len(rows)
        job = MovingJob(
            progress=progress,
            placement=new,
            live=self.live,
            carrier=self.carrier,
            settings=self.settings,
            desk=self.desk,
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
        """One group of slots; with the last one the layer has switched. All ranks have the same groups."""
        assert job.transfer is not None, "a layer that switches was staged"
        plan, slot_bytes = job.transfer.plan, self.live.spare.slot_bytes
        group = job.groups.popleft()
        copied_s = self.live.switch(plan, group)
        own = sum(slot // self.live.topology.slots_per_gpu == self.live.ep_rank for slot in group)
        self._measured.copied(own * slot_bytes, copied_s)
        if not job.groups:
            self.carrier.release()
            job.progress.layer_done(plan.moves, slot_bytes * self.live.expert_shards)
            job.rows.popleft()
            self._next_layer(job)

    def _end(self, progress: RebalanceProgress, outcome: str) -> None:
        self._job = None
        self.segments.clear()
        progress.paused(self.clock() - self._began)
        self.log.add(progress, outcome)
