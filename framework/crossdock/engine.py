"""The step loop of one rank: every rank, every collective, every step (DESIGN section 5).

A leader schedules its replica, its attention-TP peers follow it. A replica without work still runs the step, with zero sequences. When
nobody has work all ranks park on their links, using no CPU, until the frontend wakes all of them; step numbers go on.
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping, Sequence

import attrs

from crossdock.control_verbs import ControlVerbs
from crossdock.engine_seams import (
    AgreedStep,
    BetweenSteps,
    InFlight,
    LogitSink,
    PeerMessage,
    StepRunner,
    StepSync,
)
from crossdock.errors import RequestError
from crossdock.observe.timeline import Timeline
from crossdock.overlap_gate import OverlapGate
from crossdock.receipt import ReceiptCounters
from crossdock.scheduled import Scheduled, StepTokens
from crossdock.scheduler import Scheduler
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
from crossdock.types.observer import Observer, StepEvent
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
            return False
        tokens = self._forward(agreed, scheduled, work) if agreed.has_rows else StepTokens(token_ids=())
        if agreed.has_rows or agreed.plan.park:
            self.counters.count_step(agreed.plan)
        if self.scheduler is not None:
            outputs = [] if scheduled is None else self.scheduler.complete(scheduled, tokens)
            self._send(self.scheduler, outputs, agreed)
        self._run_controls(controls)
        for actor in self.between_steps:
            actor.after_step(agreed)
        self._observe(agreed, started_s)
        if agreed.plan.park:
            self._park(step)
        return True

    def _lead(self, step: int) -> tuple[AgreedStep, Scheduled | None, StepWork, tuple[Control, ...]]:
        assert self.scheduler is not None
        self._take(self.link.poll(0))
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

    def _forward(self, agreed: AgreedStep, scheduled: Scheduled | None, work: StepWork) -> StepTokens:
        batch = self.runner.build(work, agreed.plan)
        in_flight = self.runner.launch(agreed.plan, batch, scheduled, is_counted=agreed.is_counted)
        self.eplb_pass += 1
        tokens = self.runner.collect(in_flight)
        self._hand_over_prompt_logits(in_flight)
        return tokens

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

    def _hand_over_prompt_logits(self, in_flight: InFlight) -> None:
        if self.on_prompt_logits is None or in_flight.scheduled is None:
            return
        first, scheduled = 0, in_flight.scheduled
        for sequence, rows in zip(scheduled.sequences, scheduled.work.sequences, strict=True):
            if sequence.keeps_prompt_logits and rows.num_logit_rows:
                logits = in_flight.logits[first : first + rows.num_logit_rows]
                self.on_prompt_logits(sequence.rid, rows.end - rows.num_logit_rows, logits)
            first += rows.num_logit_rows

    # -- around a step

    def _observe(self, agreed: AgreedStep, started_s: float) -> None:
        if not self.observers or not agreed.has_rows:
            return
        plan, replica = agreed.plan, self.place.attn_dp_rank
        event = StepEvent(
            rank=self.place.rank,
            attn_dp_rank=replica,
            step=plan.step,
            forward_mode=plan.forward_mode.name.lower(),
            padding_mode=plan.padding_mode.value,
            dispatch_mode=plan.dispatch_mode.value,
            graph=plan.bucket is not None,
            overlap=plan.overlap,
            local_tokens=plan.live_tokens[replica],
            all_tokens=plan.live_tokens,
            attention_pairs=tuple(record.attention_pairs for record in agreed.records),
            sync_wait_s=agreed.wait_s,
            duration_s=time.perf_counter() - started_s,
            is_health_check=not agreed.is_counted,
            spans=() if self.timeline is None else self.timeline.last_spans,
        )
        for observer in self.observers:
            observer.on_step(event)

    def _park(self, step: int) -> None:
        """Waits for the wake that ends this park. Work alone does not: one rank would step without the others."""
        if self.scheduler is not None:
            self.link.send(Parked(rank=self.place.rank, step=step))
        while self._woken_step < step and not self._stops:
            self._take(self.link.poll(None))
