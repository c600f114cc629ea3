"""Rules across fields: lengths against the context, sampling, what is not supported. Each refusal names field and rule."""

from __future__ import annotations

import secrets
from typing import Any

import attrs

from crossdock.errors import RequestError
from crossdock.serving.generation import GenerationPlan, PromptTokens
from crossdock.serving.model_facts import ModelFacts
from crossdock.serving.prompts import check_prompts
from crossdock.serving.protocol.requests import ChatBody, CompletionBody, SamplingFields
from crossdock.types.request import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
"""The OpenAI interface's default of ``max_tokens`` for completions; chat goes on to the end of the context."""


@attrs.frozen(kw_only=True)
class TokenLimits:
    """Wishes for the output's length, under the names that the client used."""

    max_tokens: int | None
    max_tokens_field: str
    min_tokens: int
    default_tokens: int | None
    """Used when ``max_tokens`` is absent, cut to the room that is left; None: all of it."""


def new_token_limit(prompt_length: int, limits: TokenLimits, model: ModelFacts, field: str) -> int:
    """How many tokens may be generated.

    Raises:
        RequestError: prompt and output do not fit into the context; all three numbers are in the message.
    """
    context = model.context_tokens
    room = context - prompt_length
    if limits.max_tokens is None:
        if room < 1:
            message = (
                f"{field}: {prompt_length} prompt tokens leave no room for an output in this model's context of "
                f"{context} tokens; shorten the prompt to at most {context - 1}"
            )
            raise RequestError(message, field=field)
        wanted = room if limits.default_tokens is None else min(limits.default_tokens, room)
    else:
        wanted = limits.max_tokens
        if wanted > room:
            message = (
                f"{limits.max_tokens_field}: {prompt_length} prompt tokens and {wanted} requested tokens are "
                f"{prompt_length + wanted}, this model's context is {context} tokens; shorten the prompt or ask for less"
            )
            raise RequestError(message, field=limits.max_tokens_field if room > 0 else field)
    if limits.min_tokens > wanted:
        message = f"min_tokens: {limits.min_tokens} is more than the {wanted} tokens that may be generated"
        raise RequestError(message, field="min_tokens")
    return wanted


def base_sampling(fields: SamplingFields, model: ModelFacts) -> SamplingParams:
    """Sampling without lengths and log-probabilities. A request without a seed gets a fresh one."""
    bias = _logit_bias(fields.logit_bias or {}, model)
    stop_ids = tuple(fields.stop_token_ids or ())
    if any(token >= model.vocab_size for token in stop_ids):
        message = f"stop_token_ids: ids must be below the vocabulary's size of {model.vocab_size}"
        raise RequestError(message, field="stop_token_ids")
    return SamplingParams(
        max_new_tokens=0,
        temperature=_given(fields.temperature, 1.0),
        top_p=_given(fields.top_p, 1.0),
        top_k=_given(fields.top_k, -1) or -1,
        min_p=_given(fields.min_p, 0.0),
        repetition_penalty=_given(fields.repetition_penalty, 1.0),
        presence_penalty=_given(fields.presence_penalty, 0.0),
        frequency_penalty=_given(fields.frequency_penalty, 0.0),
        logit_bias=bias,
        seed=secrets.randbits(63) if fields.seed is None else fields.seed,
        stop_token_ids=stop_ids,
        ignore_eos=fields.ignore_eos,
    )


def check_stream_options(fields: SamplingFields) -> None:
    """Raises ``RequestError`` for ``stream_options`` without ``stream``."""
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("stream_options: only allowed with stream true", field="stream_options")


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """``stop`` of either form."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def make_plan(
    fields: SamplingFields,
    *,
    request_id: str,
    prompts: tuple[PromptTokens, ...],
    prompt_field: str,
    model: ModelFacts,
    limits: TokenLimits,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    is_health_check: bool = False,
) -> GenerationPlan:
    """The plan of a request whose own rules have been checked."""
    check_prompts(prompts, prompt_field, model)
    check_stream_options(fields)
    base = attrs.evolve(base_sampling(fields, model), logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    lengths = [new_token_limit(len(prompt.ids), limits, model, prompt_field) for prompt in prompts]
    return GenerationPlan(
        request_id=request_id,
        prompts=prompts,
        n=_given(fields.n, 1),
        sampling=tuple(
            attrs.evolve(base, max_new_tokens=length, min_new_tokens=limits.min_tokens) for length in lengths
        ),
        stops=stop_strings(fields.stop),
        include_stop=fields.include_stop_str_in_output,
        skip_special_tokens=fields.skip_special_tokens,
        routed_dp_rank=fields.routed_dp_rank,
        is_health_check=is_health_check,
        priority=_given(fields.priority, 0),
    )


def check_completion(body: CompletionBody) -> None:
    """Rules of ``/v1/completions`` that one field alone cannot state."""
    if body.suffix:
        raise RequestError("suffix: not supported; leave it out", field="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError("best_of: must equal n; choosing among more samples is not supported", field="best_of")
    if (completion_max_tokens(body) == 0) and not body.echo:
        message = "max_tokens: must be at least 1; 0 only with echo true, which scores the prompt"
        raise RequestError(message, field="max_tokens")


def completion_max_tokens(body: CompletionBody) -> int | None:
    """``max_tokens``, or the chat interface's name for it, which some clients send."""
    return body.max_tokens if body.max_tokens is not None else body.max_completion_tokens


def check_chat(body: ChatBody, *, takes_tools: bool) -> None:
    """Rules of ``/v1/chat/completions`` that one field alone cannot state; ``takes_tools`` is the chat template's."""
    if not body.messages:
        raise RequestError("messages: must not be empty", field="messages")
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs: only allowed with logprobs true", field="top_logprobs")
    if body.tool_choice not in (None, "none", "auto"):
        message = f"tool_choice: {body.tool_choice!r} is not supported, output is not constrained; use 'auto' or 'none'"
        raise RequestError(message, field="tool_choice")
    if body.tools and body.tool_choice != "none" and not takes_tools:
        message = "tools: this model's chat template does not write them into the prompt; leave them out or set tool_choice 'none'"
        raise RequestError(message, field="tools")
    if body.response_format is not None and body.response_format.type != "text":
        message = f"response_format: type {body.response_format.type!r} is not supported, output is not constrained; use 'text'"
        raise RequestError(message, field="response_format")


def _logit_bias(bias: dict[str, float], model: ModelFacts) -> tuple[tuple[int, float], ...]:
    pairs: list[tuple[int, float]] = []
    for key, value in bias.items():
        if not key.isdecimal() or int(key) >= model.vocab_size:
            message = f"logit_bias: key {key!r} is not a token id (0 to {model.vocab_size - 1})"
            raise RequestError(message, field="logit_bias")
        pairs.append((int(key), value))
    return tuple(pairs)


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value
