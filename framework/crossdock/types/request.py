"""Requests and their outputs between frontend and engine: plain data, encoded with msgspec (DESIGN section 2)."""

from __future__ import annotations

import attrs

from crossdock.types.step_totals import StepTotals

GREEDY_BELOW = 1e-6


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How tokens of one sequence are chosen. ``temperature`` 0 is greedy."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    """Always set: the frontend draws one for requests without."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of alternatives per generated token; 0 = the chosen token only; None = no logprobs."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens (echo); computed in chunks."""

    @property
    def is_greedy(self) -> bool:
        """The likeliest token is taken. Temperatures near 0 are greedy too: dividing by them overflows float32."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def is_penalised(self) -> bool:
        """The tokens so far matter to the choice."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@attrs.frozen(kw_only=True)
class EngineRequest:
    """One sequence for one replica. String stops are matched by the frontend, which aborts."""

    rid: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    is_health_check: bool = False
    priority: int = 0
    """Smaller goes first; equal ones in order of arrival."""


@attrs.frozen(kw_only=True)
class TokenLogprob:
    """Log probability of one token, with alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0
    """How many tokens were more likely; 0 is the best."""


@attrs.frozen(kw_only=True)
class EngineOutput:
    """New tokens of one sequence since the last output."""

    rid: str
    token_ids: tuple[int, ...]
    """With ``stop`` the last one is the end token."""
    finish_reason: str | None = None
    """``stop``, ``length``, ``abort``, ``error``; None while running."""
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """Sent once, with the first token; first entry None."""
    queued_s: float = 0.0
    prefill_s: float = 0.0


@attrs.frozen(kw_only=True)
class ReplicaLoad:
    """A replica's load report, sent to the frontend with outputs and at least every 20 ms while it works."""

    attn_dp_rank: int
    running: int
    waiting: int
    tokens: int
    """Tokens in the cache or waiting to be prefilled."""
    attention_pairs: int
    kv_usage: float
    step: int
    preemptions: int = 0
    """Sequences that gave up their pages since the start, to be computed again."""
    steps: StepTotals = attrs.Factory(StepTotals)
    gauges: dict[str, float] = attrs.Factory(dict)
    """Further numbers of the rank for ``/metrics``, by name."""
