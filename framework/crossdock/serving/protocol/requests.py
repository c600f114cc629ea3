"""What clients send. Keys that are not listed are ignored (and logged once); listed ones are checked, never dropped."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from crossdock.serving.protocol.fields import (
    Bias,
    Choices,
    MinP,
    Penalty,
    PositiveTokenCount,
    Priority,
    Prompt,
    RepetitionPenalty,
    Seed,
    StopString,
    StopStrings,
    Temperature,
    TokenCount,
    TokenId,
    TopK,
    TopLogprobs,
    TopP,
)


@attrs.frozen(kw_only=True)
class StreamOptions:
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


@attrs.frozen(kw_only=True)
class DecodingFields:
    """How tokens are chosen and where a text ends, under the names that every endpoint uses."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[str, Bias] | None = None
    n: Choices | None = None
    seed: Seed | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True


@attrs.frozen(kw_only=True)
class SamplingFields(DecodingFields):
    """Fields that completions and chat completions share."""

    model: str | None = None
    include_stop_str_in_output: bool = False
    min_tokens: TokenCount | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    routed_dp_rank: TokenCount | None = None
    """Pins the request to one attention replica."""
    priority: Priority | None = None
    """Smaller goes first, 0 is usual; equal ones go in order of arrival."""


@attrs.frozen(kw_only=True)
class CompletionBody(SamplingFields):
    """``POST /v1/completions``."""

    prompt: Prompt | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    """Some clients send the chat field's name here."""
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: Choices | None = None
    suffix: str | None = None
    add_special_tokens: bool = True
    """Of text prompts; token ids are taken as they are."""


@attrs.frozen(kw_only=True)
class ChatMessage:
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """Of an earlier answer; some templates write it."""


@attrs.frozen(kw_only=True)
class ResponseFormat:
    type: str = "text"


@attrs.frozen(kw_only=True)
class ChatBody(SamplingFields):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    max_tokens: PositiveTokenCount | None = None
    max_completion_tokens: PositiveTokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True


@attrs.frozen(kw_only=True)
class GenerateSampling(DecodingFields):
    """``sampling_params`` of ``POST /generate``."""

    max_new_tokens: TokenCount | None = None
    min_new_tokens: TokenCount | None = None
    no_stop_trim: bool = False
    """The stop text stays in the output."""


@attrs.frozen(kw_only=True)
class GenerateBody:
    """``POST /generate``: token ids (or text) in, token ids out."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: GenerateSampling | None = None
    rid: str | None = None
    stream: bool = False
    return_logprob: bool = False
    top_logprobs_num: TopLogprobs | None = None
    routed_dp_rank: TokenCount | None = None


@attrs.frozen(kw_only=True)
class TokenizeBody:
    """``POST /tokenize``: a prompt, or chat messages through the template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


@attrs.frozen(kw_only=True)
class DetokenizeBody:
    """``POST /detokenize``."""

    tokens: list[TokenId]
    model: str | None = None


@attrs.frozen(kw_only=True)
class AbortBody:
    """``POST /abort_request``: one request by its id, or all."""

    rid: str | None = None
    abort_all: bool = False


@attrs.frozen(kw_only=True)
class RecordBody:
    """Arguments of the expert recorder's verbs, passed on to the recorder as they are."""

    mode: Literal["stat", "stat_approx", "per_pass", "per_token"] | None = None
    output_dir: str | None = None


@attrs.frozen(kw_only=True)
class ProfileBody:
    """``POST /start_profile`` and ``/stop_profile``."""

    output_dir: str | None = None
