"""A scheduler driven without a model: the "cache" holds token ids, the "model" is a hash of the whole prefix that it reads back."""

from __future__ import annotations

import zlib
from array import array

from crossdock.scheduled import Scheduled, StepTokens
from crossdock.scheduler import Scheduler
from crossdock.sequence import SequenceState
from crossdock.step_work import PENDING, SequenceRows
from crossdock.types.request import EngineOutput, EngineRequest, SamplingParams, TokenLogprob

POISON = -7


def next_token(prefix: list[int], vocab_size: int) -> int:
    """What the paper model says after ``prefix``: depends on every token and its position."""
    return zlib.crc32(array("q", prefix).tobytes()) % vocab_size


def request(rid: str, prompt: list[int], max_new_tokens: int = 4, **sampling: object) -> EngineRequest:
    """A request with ``ignore_eos``-free greedy sampling, for tests."""
    values: dict[str, object] = {"temperature": 0.0, **sampling}
    params = SamplingParams(max_new_tokens=max_new_tokens, **values)  # type: ignore[arg-type]
    return EngineRequest(rid=rid, prompt_ids=tuple(prompt), sampling=params)


class PaperEngine:
    """Runs steps of a scheduler and checks that each row finds exactly its prefix in the pages that it is given.

    With a scheduler of depth 1 a step is computed when it is scheduled and complete after the next one is.
    """

    def __init__(self, scheduler: Scheduler, vocab_size: int = 50) -> None:
        self.scheduler = scheduler
        self.vocab_size = vocab_size
        self.memory: dict[int, int] = {}
        self.outputs: dict[str, list[EngineOutput]] = {}
        self.steps: list[Scheduled] = []
        self._sampled: tuple[int, ...] = ()
        self._in_flight: list[tuple[Scheduled, StepTokens, list[list[int]]]] = []

    def tokens_of(self, rid: str) -> list[int]:
        return [token for output in self.outputs.get(rid, []) for token in output.token_ids]

    def step(self) -> Scheduled:
        """One step; outputs of those that are complete are filed by request id."""
        if self.scheduler.needs_tokens:
            self.drain()
        scheduled = self.scheduler.schedule()
        self._compute(scheduled)
        kept = self.scheduler.depth if scheduled.sequences else 0
        while len(self._in_flight) > kept:
            self._complete()
        return scheduled

    def finish(self, scheduled: Scheduled) -> None:
        """Computes the rows of ``scheduled`` and completes it and what was before it."""
        self._compute(scheduled)
        self.drain()

    def drain(self) -> None:
        """Completes whatever is in flight."""
        while self._in_flight:
            self._complete()

    def _compute(self, scheduled: Scheduled) -> None:
        self.steps.append(scheduled)
        chosen: list[int] = []
        prompt: list[tuple[TokenLogprob, ...]] = []
        prefixes: list[list[int]] = []
        for sequence, rows in zip(scheduled.sequences, scheduled.work.sequences, strict=True):
            self._write(rows)
            prefix = self._read(rows)
            prefixes.append(prefix)
            if rows.samples:
                chosen.append(next_token(prefix, self.vocab_size))
            prompt.append(self._prompt_logprobs(prefix, rows, sequence.num_prompt))
        self._sampled = tuple(chosen)
        tokens = StepTokens(token_ids=self._sampled, prompt_logprobs=tuple(prompt))
        self._in_flight.append((scheduled, tokens, prefixes))

    def _complete(self) -> None:
        scheduled, tokens, prefixes = self._in_flight.pop(0)
        for sequence, rows, prefix in zip(scheduled.sequences, scheduled.work.sequences, prefixes, strict=True):
            is_needed = sequence.state is SequenceState.RUNNING
            assert not is_needed or prefix == sequence.tokens[: rows.end], "a row read another sequence's pages"
        for output in self.scheduler.complete(scheduled, tokens):
            self.outputs.setdefault(output.rid, []).append(output)

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                self.drain()
                return
            was_in_flight = bool(self._in_flight)
            scheduled = self.step()
            assert scheduled.sequences or was_in_flight, "there is work but nothing was scheduled"
        raise AssertionError(f"work is left after {max_steps} steps")

    def _slot(self, rows: SequenceRows, position: int) -> int:
        size = self.scheduler.pool.page_tokens
        page = rows.pages[position // size]
        assert page != 0, "a live row points into the scratch page"
        return page * size + position % size

    def _write(self, rows: SequenceRows) -> None:
        for offset, token in enumerate(rows.tokens):
            known = self._sampled[rows.source] if token == PENDING else token
            self.memory[self._slot(rows, rows.start + offset)] = known

    def _read(self, rows: SequenceRows) -> list[int]:
        return [self.memory.get(self._slot(rows, position), POISON) for position in range(rows.end)]

    def _prompt_logprobs(self, prefix: list[int], rows: SequenceRows, num_prompt: int) -> tuple[TokenLogprob, ...]:
        first = rows.end - rows.num_logit_rows
        wanted = range(first, min(rows.end, num_prompt - 1))
        return tuple(TokenLogprob(token_id=position + 1, logprob=-1.0) for position in wanted)
