"""The step loop of one rank: every rank, every collective, every step (DESIGN section 5).

A leader schedules its replica, its attention-TP peers follow it. A replica without work still runs the step, with zero sequences. With
depth 1 the tokens of a step are taken after the next one was launched, so that the host works while the device does. When nobody has
work all ranks park on their links, using no CPU, until the frontend wakes all of them; step numbers go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import MutableMapping, Sequence

import attrs

from crossdock.control_verbs import ControlVerbs
from crossdock.engine_seams import (
    AgreedStep,
    BetweenSteps,
    LogitSink,
    PeerMessage,
    StepRunner,
    StepSync,
)
from crossdock.errors import RequestError
from crossdock.observe.receipt import ReceiptCounters
from crossdock.observe.timeline import Timeline
from crossdock.overlap_gate import OverlapGate
from crossdock.scheduled import Scheduled, StepTokens
from crossdock.scheduler import Scheduler
from crossdock.step_reports import OpenStep, hand_over_prompt_logits, step_event
from crossdock.step_totals import StepTotalsCounter
from crossdock.step_work import StepWork
from crossdock.types.link import (
    AbortRequests,
    AddRequests,
    Control,
    Incoming,
    Outputs,
    Parked,
    RankLink,
    Stop,
    Wake,
)
from crossdock.types.observer import Observer
from crossdock.types.parallel import RankPlace
from crossdock.types.request import EngineOutput, EngineRequest
from crossdock.types.step import StepRecord

LOAD_REPORT_S = 0.02
"""A working replica reports its load at least so often."""


@attrs.define(kw_only=True, eq=False)
class RankEngine:
    """The loop of one rank. ``scheduler`` is None on an attention-TP peer."""

    place: RankPlace
    link: RankLink
    sync: StepSync
    runner: StepRunner
    scheduler: Scheduler | None
    depth: int = 0
    """Steps, 0 or 1, whose tokens are not taken when the next one is launched; equal to the scheduler's."""
    verbs: ControlVerbs
    counters: ReceiptCounters
    observers: Sequence[Observer] = ()
    between_steps: Sequence[BetweenSteps] = ()
    gauges: MutableMapping[str, float] = attrs.field(factory=dict[str, float])
    """Numbers that go with load reports to ``/metrics``; those who act between steps write them."""
    totals: StepTotalsCounter = attrs.field(factory=StepTotalsCounter)
    overlap: OverlapGate | None = None
    """Votes on overlap; None where the strategy runs one micro-batch."""
    timeline: Timeline | None = None
    """What the runner times; for observers."""
    on_prompt_logits: LogitSink | None = None
    """When given, requests that generate nothing and ask for no log-probabilities get the logits of all their rows."""
    eplb_pass: int = attrs.field(default=0, init=False)
    """Forward passes so far; equal on all ranks, because none can skip one."""
    _open: deque[OpenStep] = attrs.field(factory=deque[OpenStep], init=False)
    _stops: bool = attrs.field(default=False, init=False)
    _woken_step: int = attrs.field(default=-1, init=False)
    _controls: list[Control] = attrs.field(factory=list[Control], init=False)
    _controls_done: int = attrs.field(default=0, init=False)
    _reported_s: float = attrs.field(default=0.0, init=False)

    def run(self) -> None:
        """Steps until every replica was told to stop."""
        step = 0
        while self._one_step(step):
            step += 1

    # -- one step

    def _one_step(self, step: int) -> bool:
        """False when all ranks leave together."""
        started_s = time.perf_counter()
        agreed, scheduled, work, controls = self._lead(step) if self.scheduler else self._follow(step)
        if agreed.everybody_stops:
            self._finish(kept=0)
            return False
        in_flight = None
        if agreed.has_rows:
            batch = self.runner.build(work, agreed.plan)
            in_flight = self.runner.launch(agreed.plan, batch, scheduled, is_counted=agreed.is_counted)
            self.eplb_pass += 1
        if agreed.has_rows or agreed.plan.park:
            self.counters.count_step(agreed.plan)
        self._open.append(OpenStep(agreed=agreed, scheduled=scheduled, in_flight=in_flight, started_s=started_s))
        self._finish(kept=self.depth if agreed.has_rows else 0)
        self._run_controls(controls)
        for actor in self.between_steps:
            actor.after_step(agreed)
        if agreed.plan.park:
            self._park(step)
        return True

    def _finish(self, *, kept: int) -> None:
        """Takes the tokens of all open steps but the last ``kept``."""
        while len(self._open) > kept:
            step = self._open.popleft()
            tokens = StepTokens(token_ids=())
            if step.in_flight is not None:
                tokens = self.runner.collect(step.in_flight)
                if self.on_prompt_logits is not None:
                    hand_over_prompt_logits(step.in_flight, self.on_prompt_logits)
            if self.scheduler is not None:
                outputs = [] if step.scheduled is None else self.scheduler.complete(step.scheduled, tokens)
                self._send(self.scheduler, outputs, step.agreed)
            if self.overlap is not None:
                self.overlap.after_step(step.agreed)
            if self.observers and step.in_flight is not None:
                event = step_event(step, self.place, self.timeline)
                for observer in self.observers:
                    observer.on_step(event)

    def _lead(self, step: int) -> tuple[AgreedStep, Scheduled | None, StepWork, tuple[Control, ...]]:
        assert self.scheduler is not None
        self._take(self.link.poll(0))
        if self.scheduler.needs_tokens:
            self._finish(kept=0)
        scheduled = None if self._stops else self.scheduler.schedule()
        work = StepWork() if scheduled is None else scheduled.work
        agreed = self.sync.agree(self._record(step, scheduled, work))
        ready = min(record.controls for record in agreed.records) - self._controls_done
        controls = tuple(self._controls[:ready])
        self.sync.tell_peers(agreed, PeerMessage(work=work, controls=controls).encode())
        return agreed, scheduled, work, controls

    def _follow(self, step: int) -> tuple[AgreedStep, Scheduled | None, StepWork, tuple[Control, ...]]:
        agreed, data = self.sync.follow(step, self.eplb_pass)
        message = PeerMessage.decode(data)
        return agreed, None, message.work, message.controls

    def _record(self, step: int, scheduled: Scheduled | None, work: StepWork) -> StepRecord:
        assert self.scheduler is not None
        num_controls = self._controls_done + len(self._controls)
        is_busy = any(actor.is_busy for actor in self.between_steps)
        is_working = self.scheduler.has_work or bool(self._controls) or is_busy
        record = work.record(
            step=step,
            eplb_pass=self.eplb_pass,
            has_work=is_working and not self._stops,
            is_health_check=scheduled is not None and scheduled.is_health_check,
        )
        if self.overlap is not None:
            record = self.overlap.vote(record, [len(rows.tokens) for rows in work.sequences])
        return attrs.evolve(record, stop=int(self._stops), controls=num_controls)

    # -- messages

    def _take(self, messages: Sequence[Incoming]) -> None:
        """Takes in what the frontend sent, in order."""
        for message in messages:
            match message:
                case AddRequests(requests=requests):
                    self._add(requests)
                case AbortRequests(rids=rids):
                    self._abort(rids)
                case Wake(step=step):
                    self._woken_step = max(self._woken_step, step)
                case Stop():
                    self._stops = True
                case Control():
                    self._control(message)

    def _add(self, requests: Sequence[EngineRequest]) -> None:
        assert self.scheduler is not None
        refused: list[EngineOutput] = []
        for request in requests:
            scores = request.sampling.max_new_tokens == 0 and request.sampling.prompt_logprobs is None
            try:
                self.scheduler.add(request, keeps_prompt_logits=scores and self.on_prompt_logits is not None)
            except RequestError as error:
                refused.append(EngineOutput(rid=request.rid, token_ids=(), finish_reason="error", error=str(error)))
        if refused:
            self.link.send(Outputs(outputs=tuple(refused)))

    def _abort(self, rids: Sequence[str]) -> None:
        assert self.scheduler is not None
        ended = [output for output in map(self.scheduler.abort, rids) if output is not None]
        if ended:
            self.link.send(Outputs(outputs=tuple(ended)))

    def _control(self, control: Control) -> None:
        """Answers a verb of this leader alone at once; keeps one for all ranks until every leader has it."""
        if control.verb in self.verbs.together:
            self._controls.append(control)
        else:
            self.link.send(self.verbs.run(control, self.place.rank))

    def _run_controls(self, controls: Sequence[Control]) -> None:
        for control in controls:
            reply = self.verbs.run(control, self.place.rank)
            if self.scheduler is not None:
                self.link.send(reply)
        self._controls_done += len(controls)
        del self._controls[: len(controls)]

    def _send(self, scheduler: Scheduler, outputs: Sequence[EngineOutput], agreed: AgreedStep) -> None:
        """Outputs with a load report; a report alone when it is time for one, and before a park: no later one would come."""
        is_time = time.monotonic() - self._reported_s >= LOAD_REPORT_S
        if outputs or agreed.plan.park or (agreed.has_rows and is_time):
            self._reported_s = time.monotonic()
            load = scheduler.load(self.place.attn_dp_rank, agreed.plan.step)
            load = self.totals.added_to(load, preemptions=scheduler.num_preemptions, gauges=self.gauges)
            self.link.send(Outputs(outputs=tuple(outputs), load=load))

    def _park(self, step: int) -> None:
        """Waits for the wake that ends this park. Work alone does not: one rank would step without the others."""
        if self.scheduler is not None:
            self.link.send(Parked(rank=self.place.rank, step=step))
        while self._woken_step < step and not self._stops:
            self._take(self.link.poll(None))
