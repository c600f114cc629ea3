"""The scheduler of one replica: which rows each step computes, who holds pages, when a sequence ends.

One step at a time: ``schedule`` picks rows, the engine computes them, ``complete`` takes the sampled tokens. Order everywhere is
(priority, arrival). Running sequences that generate get their row first, so a long prompt never starves them; the rest of the step's
rows goes to prompts in chunks. A prompt is admitted when all its pages fit; when a generating sequence finds no page, the sequence that
comes last gives up its pages and is computed again later (often from the prefix cache). The first in order is never preempted, so
somebody always gets on.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable

from crossdock.errors import MisuseError, OverloadedError, RequestError
from crossdock.kv_cache import BlockPool
from crossdock.scheduled import Scheduled, SchedulerLimits, StepTokens, check_request, replica_load
from crossdock.sequence import EngineSequence, SequenceState
from crossdock.step_work import SequenceRows, StepWork
from crossdock.types.request import EngineOutput, EngineRequest, ReplicaLoad, TokenLogprob


class Scheduler:
    """Not thread-safe: everything happens between two steps, on the leader."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, eos_token_ids: Iterable[int] = ()) -> None:
        self.limits = limits
        self.pool = pool
        self.eos_token_ids = frozenset(eos_token_ids)
        self._waiting: list[EngineSequence] = []
        self._running: list[EngineSequence] = []
        self._by_rid: dict[str, EngineSequence] = {}
        self._in_flight: Scheduled | None = None
        self._arrivals = 0
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Any unfinished request."""
        return bool(self._by_rid)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    # -- requests in and out

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
        if self._in_flight is not None:
            raise MisuseError("a step was scheduled while the one before is not complete")
        picked: list[tuple[EngineSequence, SequenceRows]] = []
        decodes = sum(sequence.is_decoding for sequence in self._running)
        budget = self.limits.max_step_tokens - decodes
        preemptions = self.num_preemptions
        for sequence in tuple(self._running):
            if sequence.state is not SequenceState.RUNNING:
                continue
            if sequence.is_decoding:
                if self._has_page_for_next(sequence):
                    picked.append((sequence, self._rows(sequence, 1)))
            elif budget > 0:
                budget -= self._pick_chunk(sequence, budget, picked)
        if preemptions == self.num_preemptions:
            self._admit(budget, picked)
        for sequence, rows in picked:
            sequence.rows_in_flight = len(rows.tokens)
        work = StepWork(sequences=tuple(rows for _, rows in picked))
        self._in_flight = Scheduled(work=work, sequences=tuple(sequence for sequence, _ in picked))
        return self._in_flight

    def complete(self, scheduled: Scheduled, chosen: StepTokens) -> list[EngineOutput]:
        """The step ran: its rows are in the cache and ``chosen`` are the new tokens. Returns what is to be sent."""
        if scheduled is not self._in_flight:
            raise MisuseError("a step was completed that is not the one in flight")
        self._in_flight = None
        outputs: list[EngineOutput] = []
        taken = 0
        parts = zip(scheduled.sequences, scheduled.work.sequences, strict=True)
        for index, (sequence, rows) in enumerate(parts):
            sequence.rows_in_flight = 0
            samples = sequence.samples_at(rows.end)
            if sequence.state is SequenceState.FINISHED:
                self.pool.release(sequence.pages)
                sequence.pages = []
            else:
                prompt = chosen.prompt_logprobs[index] if chosen.prompt_logprobs else ()
                self._rows_done(sequence, rows, prompt)
                output = self._advance(sequence, rows, chosen, taken if samples else None)
                if output is not None:
                    outputs.append(output)
            taken += samples
        return outputs

    def load(self, attn_dp_rank: int, step: int) -> ReplicaLoad:
        """Load of this replica without health probes."""
        return replica_load(self._running, self._waiting, self.pool, attn_dp_rank=attn_dp_rank, step=step)

    # -- parts of the above, in order of use

    def _has_page_for_next(self, sequence: EngineSequence) -> bool:
        """Makes room for one more token of ``sequence``, preempting those who come after it; False when it had to go itself."""
        while self.pool.pages_for(sequence.computed + 1) > len(sequence.pages):
            pages = self.pool.allocate(1)
            if pages is not None:
                sequence.pages.extend(pages)
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
        picked.append((sequence, self._rows(sequence, count)))
        return count

    def _rows(self, sequence: EngineSequence, count: int) -> SequenceRows:
        start = sequence.computed
        return SequenceRows(
            tokens=tuple(sequence.tokens[start : start + count]),
            start=start,
            pages=tuple(sequence.pages),
            num_logit_rows=sequence.logit_rows(start, start + count),
            is_decode=sequence.is_decoding,
        )

    def _admit(self, budget: int, picked: list[tuple[EngineSequence, SequenceRows]]) -> None:
        """Starts waiting sequences in order while rows, places and pages last; nobody overtakes."""
        while self._waiting and budget > 0 and len(self._running) < self.limits.max_running_requests:
            sequence = self._waiting[0]
            if not self._take_pages(sequence):
                return
            del self._waiting[0]
            sequence.state = SequenceState.RUNNING
            if sequence.started_s is None:
                sequence.started_s = time.monotonic()
            bisect.insort(self._running, sequence, key=lambda running: running.order)
            budget -= self._pick_chunk(sequence, budget, picked)

    def _take_pages(self, sequence: EngineSequence) -> bool:
        """Pages for all tokens of ``sequence``, the known prefix from the cache; leaves one page for each running sequence."""
        found: list[int] = []
        if not sequence.wants_prompt_rows:
            sequence.chain = self.pool.hash_chain(sequence.tokens, sequence.chain)
            usable = (len(sequence.tokens) - 1) // self.pool.page_tokens
            found = self.pool.match(sequence.chain[:usable])
        self.pool.hold(found)
        new = self.pool.pages_for(len(sequence.tokens)) - len(found)
        reserve = len(self._running)
        pages = self.pool.allocate(new) if new + reserve <= self.pool.available_pages else None
        if pages is None:
            self.pool.release(found)
            return False
        sequence.pages = found + pages
        sequence.published = len(found)
        sequence.computed = len(found) * self.pool.page_tokens
        if sequence.started_s is None:
            sequence.cached_tokens = sequence.computed
        return True

    def _preempt(self, sequence: EngineSequence) -> None:
        self._running.remove(sequence)
        self.pool.release(sequence.pages)
        sequence.pages, sequence.published, sequence.computed = [], 0, 0
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
        sequence.computed = rows.end
        full = rows.end // self.pool.page_tokens
        if full > sequence.published:
            sequence.chain = self.pool.hash_chain(sequence.tokens[: full * self.pool.page_tokens], sequence.chain)
            for index in range(sequence.published, full):
                self.pool.publish(sequence.pages[index], sequence.chain[index])
            sequence.published = full

    def _advance(
        self, sequence: EngineSequence, rows: SequenceRows, chosen: StepTokens, place: int | None
    ) -> EngineOutput | None:
        """Takes the new token, if there is one, and ends the sequence if it is over."""
        if place is None:
            if not (sequence.ends_with_prompt and rows.end == sequence.num_prompt):
                return None
            self._end(sequence)
            return sequence.output(token_ids=(), finish_reason="length")
        token = chosen.token_ids[place]
        sequence.tokens.append(token)
        logprob = chosen.logprobs[place] if chosen.logprobs else None
        reason = sequence.finish_reason(self.eos_token_ids, self.limits.max_sequence_tokens)
        if reason is None and len(sequence.tokens) > self.pool.usable_pages * self.pool.page_tokens:
            reason = "length"
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
        del self._by_rid[sequence.rid]
        if sequence.rows_in_flight == 0:
            self.pool.release(sequence.pages)
            sequence.pages = []
