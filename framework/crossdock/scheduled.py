"""Values around the scheduler: its limits, a scheduled step, the tokens chosen for it, and two pure functions over them."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from crossdock.errors import ConfigValueError, RequestError
from crossdock.kv_cache import BlockPool
from crossdock.sequence import EngineSequence
from crossdock.step_work import StepWork
from crossdock.types.request import EngineRequest, ReplicaLoad, TokenLogprob


@attrs.frozen(kw_only=True)
class SchedulerLimits:
    """Limits of one replica."""

    max_running_requests: int
    max_step_tokens: int
    """Most rows of a step."""
    chunk_tokens: int
    """Most prompt rows of one sequence in a step; the rest of the step's rows is for others."""
    max_sequence_tokens: int
    """Prompt and generated tokens of one sequence together."""
    max_queued_requests: int = 1024
    vocab_size: int | None = None
    """Token ids of requests must be below it; None where no model is behind the scheduler."""

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.max_running_requests <= self.max_step_tokens:
            problem = (
                f"scheduler.max_running_requests = {self.max_running_requests} must be from 1 to scheduler.max_step_tokens"
                f" = {self.max_step_tokens}: each generating request takes one row of a step"
            )
            raise ConfigValueError([problem])
        if self.chunk_tokens < 1:
            raise ConfigValueError([f"scheduler.chunk_tokens = {self.chunk_tokens} must be at least 1"])


@attrs.frozen(kw_only=True, eq=False)
class Scheduled:
    """Rows of a step and whose they are, in the same order."""

    work: StepWork
    sequences: tuple[EngineSequence, ...]

    @property
    def is_health_check(self) -> bool:
        """Every sequence of the step is a probe."""
        return bool(self.sequences) and all(sequence.request.is_health_check for sequence in self.sequences)

    @property
    def samples(self) -> tuple[bool, ...]:
        """Which sequences get a new token."""
        return tuple(rows.samples for rows in self.work.sequences)


@attrs.frozen(kw_only=True)
class StepTokens:
    """What the sampler chose: one entry for each sequence of the step that samples, in order."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...] = ()
    """Empty when nobody asked for any."""
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """For each sequence of the step, log-probabilities of the prompt tokens that follow its logit rows; empty when nobody asked."""


def check_request(request: EngineRequest, limits: SchedulerLimits, pool: BlockPool) -> None:
    """Raises ``RequestError`` for a request that this replica can never run; the message has the numbers."""
    prompt, sampling = len(request.prompt_ids), request.sampling
    if prompt == 0:
        raise RequestError("the prompt is empty; at least one token is needed", field="prompt")
    for field in ("max_new_tokens", "logprobs", "prompt_logprobs"):
        value: int | None = getattr(sampling, field)
        if value is not None and value < 0:
            raise RequestError(f"{field} must be at least 0, found {value}", field=field)
    check_token_ids(request, limits.vocab_size)
    needed = prompt + min(1, sampling.max_new_tokens)
    pool_tokens = pool.usable_pages * pool.page_tokens
    limit = min(limits.max_sequence_tokens, pool_tokens)
    if needed > limit:
        what = "the KV cache of a replica" if pool_tokens < limits.max_sequence_tokens else "the context"
        raise RequestError(
            f"the prompt has {prompt} tokens and needs {needed}, but {what} holds {limit}", field="prompt"
        )


def check_token_ids(request: EngineRequest, vocab_size: int | None) -> None:
    """Raises ``RequestError`` for an id that the model does not have; it would index beyond a table in the middle of a step."""
    if vocab_size is None:
        return
    named = {
        "prompt": request.prompt_ids,
        "logit_bias": tuple(token for token, _ in request.sampling.logit_bias),
        "stop_token_ids": request.sampling.stop_token_ids,
    }
    for field, ids in named.items():
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            wrong = next(token for token in ids if not 0 <= token < vocab_size)
            raise RequestError(
                f"{field}: token id {wrong} is outside the vocabulary (0 to {vocab_size - 1})", field=field
            )


def replica_load(
    running: Sequence[EngineSequence],
    waiting: Sequence[EngineSequence],
    pool: BlockPool,
    *,
    attn_dp_rank: int,
    step: int,
) -> ReplicaLoad:
    """Load without health probes. A prompt counts the attention pairs of all its tokens, a generating sequence those of its next."""
    running = [sequence for sequence in running if not sequence.request.is_health_check]
    waiting = [sequence for sequence in waiting if not sequence.request.is_health_check]
    tokens = pairs = 0
    for sequence in (*running, *waiting):
        length = len(sequence.tokens)
        tokens += length
        pairs += length if sequence.is_decoding else length * (length + 1) // 2
    return ReplicaLoad(
        attn_dp_rank=attn_dp_rank,
        running=len(running),
        waiting=len(waiting),
        tokens=tokens,
        attention_pairs=pairs,
        kv_usage=pool.usage().fraction_held,
        step=step,
    )
