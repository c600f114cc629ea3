"""One sequence of a replica from its arrival to its end; the scheduler moves it, everything here is about itself alone."""

from __future__ import annotations

import enum
import time
from typing import Any

import attrs

from crossdock.kv_cache import PageHash
from crossdock.step_work import PENDING, SequenceRows
from crossdock.types.request import EngineOutput, EngineRequest, TokenLogprob


class SequenceState(enum.Enum):
    """Where a sequence is. A preempted one waits again, with its generated tokens kept."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def _prompt_of(sequence: EngineSequence) -> list[int]:
    return list(sequence.request.prompt_ids)


def _num_prompt_of(sequence: EngineSequence) -> int:
    return len(sequence.request.prompt_ids)


@attrs.define(kw_only=True, eq=False)
class EngineSequence:
    """Tokens, pages and progress of one request."""

    request: EngineRequest
    arrival: int
    """Number of this arrival at the replica; a preempted sequence keeps it."""
    keeps_prompt_logits: bool = False
    """The logits of every prompt row are wanted as such (``crossdock logits``), not only their log-probabilities."""
    tokens: list[int] = attrs.field(default=attrs.Factory(_prompt_of, takes_self=True))
    """Prompt and generated tokens; ``PENDING`` stands last for one that a step in flight samples."""
    num_prompt: int = attrs.field(default=attrs.Factory(_num_prompt_of, takes_self=True), init=False)
    state: SequenceState = SequenceState.WAITING
    computed: int = 0
    """Tokens whose keys and values are in the cache, or are written by a step in flight."""
    pages: tuple[int, ...] = ()
    chain: list[PageHash] = attrs.field(factory=list[PageHash])
    """Hashes of the first full pages, as far as they were needed."""
    published: int = 0
    """Pages of ``pages`` that can be found by hash."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache gave at the first admission."""
    steps_in_flight: int = 0
    """Launched steps with rows of this sequence whose tokens the host has not taken yet."""
    sampled_at: int = -1
    """Place of the pending token among the ids of the step that samples it."""
    ends_soon: bool = False
    """The pending token is the last one, whatever it is: no further row is needed."""
    prompt_rows_done: int = 0
    """Prompt positions whose logits were already used (log-probabilities or ``keeps_prompt_logits``)."""
    prompt_logprobs: list[TokenLogprob | None] = attrs.field(factory=list[TokenLogprob | None])
    sent_prompt: bool = False
    arrived_s: float = attrs.Factory(time.monotonic)
    started_s: float | None = None
    first_token_s: float | None = None
    preemptions: int = 0

    @property
    def rid(self) -> str:
        return self.request.rid

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: smaller ``priority``, then earlier arrival."""
        return (self.request.priority, self.arrival)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_decoding(self) -> bool:
        """The next row is the only one missing, and it belongs to a token that was generated."""
        length = len(self.tokens)
        return length > self.num_prompt and self.computed == length - 1

    @property
    def is_complete(self) -> bool:
        """All rows that it will ever need are computed or in flight."""
        return self.ends_soon or self.computed == len(self.tokens)

    @property
    def takes_best(self) -> bool:
        """Its next token is the likeliest one, whatever came before."""
        p = self.request.sampling
        return p.is_greedy and p.min_new_tokens == 0 and not p.logit_bias and not p.is_penalised

    @property
    def wants_prompt_rows(self) -> bool:
        """Logits of prompt rows are still to be computed, so a prefix cannot be taken from the cache."""
        wanted = self.keeps_prompt_logits or self.request.sampling.prompt_logprobs is not None
        return wanted and self.prompt_rows_done < self.num_prompt

    @property
    def ends_with_prompt(self) -> bool:
        """Nothing is to be generated: the request only scores its prompt."""
        return self.request.sampling.max_new_tokens == 0

    def logit_rows(self, start: int, end: int) -> int:
        """How many of the rows at positions ``start`` to ``end - 1`` need logits; they are the last ones."""
        if self.wants_prompt_rows:
            return max(0, end - max(start, self.prompt_rows_done))
        return 1 if end == len(self.tokens) and not self.ends_with_prompt else 0

    def samples_at(self, end: int) -> bool:
        """The last row of a chunk up to ``end`` chooses a token."""
        return end == len(self.tokens) and not self.ends_with_prompt

    def next_row(self) -> SequenceRows:
        """The row of a generating sequence."""
        token = self.tokens[-1]
        return SequenceRows(
            tokens=(token,),
            start=self.computed,
            pages=self.pages,
            num_logit_rows=1,
            is_decode=True,
            samples=True,
            source=self.sampled_at if token == PENDING else -1,
        )

    def chunk(self, count: int) -> SequenceRows:
        """The next ``count`` rows of known tokens."""
        start, end = self.computed, self.computed + count
        return SequenceRows(
            tokens=tuple(self.tokens[start:end]),
            start=start,
            pages=self.pages,
            num_logit_rows=self.logit_rows(start, end),
            is_decode=self.is_decoding,
            samples=self.samples_at(end),
        )

    def expect_token(self, place: int, most_tokens: int) -> None:
        """A launched step samples the next token, as number ``place`` of its ids."""
        self.tokens.append(PENDING)
        self.sampled_at = place
        self.ends_soon = self._reaches_limit(len(self.tokens), most_tokens)

    def take_back(self) -> None:
        """What is in flight is not counted on any more; the sequence is computed again from its known tokens."""
        if self.tokens[-1] == PENDING:
            del self.tokens[-1]
        self.pages, self.published, self.computed, self.ends_soon = (), 0, 0, False

    def finish_reason(self, length: int, eos_token_ids: frozenset[int], most_tokens: int) -> str | None:
        """Whether its first ``length`` tokens end the sequence: ``stop``, ``length`` or None."""
        sampling = self.request.sampling
        if length - self.num_prompt > sampling.min_new_tokens:
            last = self.tokens[length - 1]
            if last in sampling.stop_token_ids or (not sampling.ignore_eos and last in eos_token_ids):
                return "stop"
        return "length" if self._reaches_limit(length, most_tokens) else None

    def _reaches_limit(self, length: int, most_tokens: int) -> bool:
        return length - self.num_prompt >= self.request.sampling.max_new_tokens or length >= most_tokens

    def output(self, **changes: Any) -> EngineOutput:
        """An output of this sequence; the parts that are sent once go with the first one."""
        if self.sent_prompt:
            return EngineOutput(rid=self.rid, **changes)
        self.sent_prompt = True
        now = time.monotonic()
        started = self.started_s if self.started_s is not None else now
        return EngineOutput(
            rid=self.rid,
            prompt_tokens=self.num_prompt,
            cached_tokens=self.cached_tokens,
            prompt_logprobs=tuple(self.prompt_logprobs),
            queued_s=started - self.arrived_s,
            prefill_s=now - started,
            **changes,
        )
