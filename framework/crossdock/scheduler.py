"""The scheduler of one replica: which rows each step computes, who holds pages, when a sequence ends.

``schedule`` picks rows, the engine computes them, ``complete`` takes the sampled tokens. A step may be scheduled while the one before it is
in flight: its generating sequences continue with a token that only the device knows yet, and one that turns out to have ended has its
extra row dropped. Order everywhere is (priority, arrival). Running sequences that generate get their row first, so a long prompt never
starves them; the rest of the step's rows goes to prompts in chunks. A prompt is admitted when all its pages fit; when a generating
sequence finds no page, the sequence that comes last gives up its pages and is computed again later (often from the prefix cache). The
first in order is never preempted, so somebody always gets on.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Iterable

from crossdock.errors import MisuseError, OverloadedError, RequestError
from crossdock.kv_cache import BlockPool
from crossdock.scheduled import Scheduled, SchedulerLimits, StepTokens, check_request, replica_load
from crossdock.sequence import EngineSequence, SequenceState
from crossdock.sequence_pages import publish_full_pages, release_pages, take_pages
from crossdock.step_work import SequenceRows, StepWork
from crossdock.types.request import EngineOutput, EngineRequest, ReplicaLoad, TokenLogprob


class Scheduler:
    """Not thread-safe: everything happens between two steps, on the leader.

    ``depth``: so many steps, 0 or 1, may be in flight when another one is scheduled.
    """

    def __init__(
        self, limits: SchedulerLimits, pool: BlockPool, eos_token_ids: Iterable[int] = (), *, depth: int = 0
    ) -> None:
        self.limits = limits
        self.depth = depth
        self.pool = pool
        self.eos_token_ids = frozenset(eos_token_ids)
        self._waiting: list[EngineSequence] = []
        self._running: list[EngineSequence] = []
        self._by_rid: dict[str, EngineSequence] = {}
        self._in_flight: deque[Scheduled] = deque()
        self._most_tokens = min(limits.max_sequence_tokens, pool.usable_pages * pool.page_tokens + 1)
        self._arrivals = 0
        self._histories = 0
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Any unfinished request."""
        return bool(self._by_rid)

    @property
    def needs_tokens(self) -> bool:
        """The step in flight must be complete before the next is scheduled: a choice depends on the tokens before it."""
        return self._histories > 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: EngineRequest, *, keeps_prompt_logits: bool = False) -> None:
        """Queues a request; raises ``RequestError`` or ``OverloadedError`` when it can never run or the queue is full."""
        if request.rid in self._by_rid:
            raise RequestError(f"request id {request.rid!r} is already running; ids must be unique", field="rid")
        check_request(request, self.limits, self.pool)
        if len(self._waiting) >= self.limits.max_queued_requests and not request.is_health_check:
            raise OverloadedError(
                f"{len(self._waiting)} requests wait at this replica, no more are taken; try again later"
            )
        sequence = EngineSequence(request=request, arrival=self._arrivals, keeps_prompt_logits=keeps_prompt_logits)
        self._arrivals += 1
        self._histories += request.sampling.is_penalised
        self._by_rid[request.rid] = sequence
        bisect.insort(self._waiting, sequence, key=lambda waiting: waiting.order)

    def abort(self, rid: str) -> EngineOutput | None:
        """Ends a sequence wherever it is; None when it is not here (any more). Rows in flight are computed and dropped."""
        sequence = self._by_rid.get(rid)
        if sequence is None:
            return None
        self._end(sequence)
        return sequence.output(token_ids=(), finish_reason="abort")

    # -- a step

    def schedule(self) -> Scheduled:
        """The rows of the next step; empty when there is nothing to compute."""
        if len(self._in_flight) > self.depth:
            raise MisuseError("a step was scheduled while the one before is not complete")
        picked: list[tuple[EngineSequence, SequenceRows]] = []
        running = [(sequence, sequence.is_decoding) for sequence in self._running if not sequence.is_complete]
        budget = self.limits.max_step_tokens - sum(is_decoding for _, is_decoding in running)
        preemptions = self.num_preemptions
        for sequence, is_decoding in running:
            if sequence.state is not SequenceState.RUNNING:
                continue
            if is_decoding:
                if self._has_page_for_next(sequence):
                    picked.append((sequence, sequence.next_row()))
            elif budget > 0:
                budget -= self._pick_chunk(sequence, budget, picked)
        if preemptions == self.num_preemptions:
            self._admit(budget, picked)
        self._launch(picked)
        work = StepWork(sequences=tuple(rows for _, rows in picked))
        scheduled = Scheduled(work=work, sequences=tuple(sequence for sequence, _ in picked))
        self._in_flight.append(scheduled)
        return scheduled

    def complete(self, scheduled: Scheduled, chosen: StepTokens) -> list[EngineOutput]:
        """The step ran: its rows are in the cache and ``chosen`` are the new tokens. Returns what is to be sent."""
        if not self._in_flight or scheduled is not self._in_flight[0]:
            raise MisuseError("a step was completed that is not the one in flight")
        self._in_flight.popleft()
        outputs: list[EngineOutput] = []
        taken = 0
        parts = zip(scheduled.sequences, scheduled.work.sequences, strict=True)
        for index, (sequence, rows) in enumerate(parts):
            sequence.steps_in_flight -= 1
            if sequence.state is SequenceState.FINISHED:
                if sequence.steps_in_flight == 0:
                    release_pages(self.pool, sequence)
            elif sequence.state is SequenceState.RUNNING:
                prompt = chosen.prompt_logprobs[index] if chosen.prompt_logprobs else ()
                self._rows_done(sequence, rows, prompt)
                output = self._advance(sequence, rows, chosen, taken if rows.samples else None)
                if output is not None:
                    outputs.append(output)
            # A waiting one was preempted after the step was scheduled, and computes these rows again.
            taken += rows.samples
        return outputs

    def load(self, attn_dp_rank: int, step: int) -> ReplicaLoad:
        """Load of this replica without health probes."""
        return replica_load(self._running, self._waiting, self.pool, attn_dp_rank=attn_dp_rank, step=step)

    # -- parts of the above, in order of use

    def _has_page_for_next(self, sequence: EngineSequence) -> bool:
        """Makes room for one more token of ``sequence``, preempting those who come after it; False when it had to go itself."""
        while sequence.computed >= len(sequence.pages) * self.pool.page_tokens:
            pages = self.pool.allocate(1)
            if pages is not None:
                sequence.pages += (*pages,)
                continue
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _pick_chunk(
        self, sequence: EngineSequence, budget: int, picked: list[tuple[EngineSequence, SequenceRows]]
    ) -> int:
        missing = len(sequence.tokens) - sequence.computed
        count = min(missing, budget, self.limits.chunk_tokens)
        picked.append((sequence, sequence.chunk(count)))
        return count

    def _launch(self, picked: list[tuple[EngineSequence, SequenceRows]]) -> None:
        """From here on the rows count as computed, and the tokens that they choose as there."""
        place = 0
        for sequence, rows in picked:
            sequence.steps_in_flight += 1
            sequence.computed = rows.end
            if rows.samples:
                sequence.expect_token(place, self._most_tokens)
                place += 1

    def _admit(self, budget: int, picked: list[tuple[EngineSequence, SequenceRows]]) -> None:
        """Starts waiting sequences in order while rows, places and pages last; nobody overtakes."""
        while self._waiting and budget > 0 and len(self._running) < self.limits.max_running_requests:
            sequence = self._waiting[0]
            # One page for each running sequence stays free, or the newcomer would soon be preempted.
            if not take_pages(self.pool, sequence, reserve=len(self._running)):
                return
            del self._waiting[0]
            sequence.state = SequenceState.RUNNING
            if sequence.started_s is None:
                sequence.started_s = time.monotonic()
            bisect.insort(self._running, sequence, key=lambda running: running.order)
            budget -= self._pick_chunk(sequence, budget, picked)

    def _preempt(self, sequence: EngineSequence) -> None:
        # Rows in flight may still write to these pages: they do so before any later step, and never to a published page.
        self._running.remove(sequence)
        release_pages(self.pool, sequence)
        sequence.take_back()
        sequence.state = SequenceState.WAITING
        sequence.preemptions += 1
        self.num_preemptions += 1
        bisect.insort(self._waiting, sequence, key=lambda waiting: waiting.order)

    def _rows_done(self, sequence: EngineSequence, rows: SequenceRows, prompt: tuple[TokenLogprob, ...]) -> None:
        """Progress and publication of full pages."""
        if sequence.wants_prompt_rows:
            if not sequence.prompt_logprobs and sequence.request.sampling.prompt_logprobs is not None:
                sequence.prompt_logprobs.append(None)
            sequence.prompt_logprobs.extend(prompt)
            sequence.prompt_rows_done = max(sequence.prompt_rows_done, min(rows.end, sequence.num_prompt))
        publish_full_pages(self.pool, sequence, rows.end)

    def _advance(
        self, sequence: EngineSequence, rows: SequenceRows, chosen: StepTokens, place: int | None
    ) -> EngineOutput | None:
        """Takes the new token, if there is one, and ends the sequence if it is over."""
        if place is None:
            if not (sequence.ends_with_prompt and rows.end == sequence.num_prompt):
                return None
            self._end(sequence)
            return sequence.output(token_ids=(), finish_reason="length")
        token = sequence.tokens[rows.end] = chosen.token_ids[place]
        logprob = chosen.logprobs[place] if chosen.logprobs else None
        reason = sequence.finish_reason(rows.end + 1, self.eos_token_ids, self._most_tokens)
        if reason is not None:
            self._end(sequence)
        return sequence.output(token_ids=(token,), finish_reason=reason, logprobs=() if logprob is None else (logprob,))

    def _end(self, sequence: EngineSequence) -> None:
        """Takes the sequence out; pages that rows in flight still write to are given back when the step is complete."""
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
        sequence.state = SequenceState.FINISHED
        self._histories -= sequence.request.sampling.is_penalised
        del self._by_rid[sequence.rid]
        if sequence.steps_in_flight == 0:
            release_pages(self.pool, sequence)
