"""What the server answers; key names are those of the OpenAI interface and of vLLM's and SGLang's own endpoints."""

from __future__ import annotations

from typing import Any, Literal

import attrs

FinishReason = Literal["stop", "length", "abort"]


@attrs.frozen(kw_only=True)
class ErrorInfo:
    message: str
    type: str
    param: str | None
    code: int


@attrs.frozen(kw_only=True)
class ErrorBody:
    """Every error of the server, 404, 405 and mid-stream ones included."""

    error: ErrorInfo


@attrs.frozen(kw_only=True)
class PromptTokensDetails:
    cached_tokens: int


@attrs.frozen(kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


@attrs.frozen(kw_only=True)
class CompletionLogprobs:
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@attrs.frozen(kw_only=True)
class CompletionChoice:
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


@attrs.frozen(kw_only=True)
class CompletionResponse:
    """The whole answer, and each chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


@attrs.frozen(kw_only=True)
class ChatTopLogprob:
    token: str
    logprob: float
    bytes: list[int] | None


@attrs.frozen(kw_only=True)
class ChatTokenLogprob:
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[ChatTopLogprob]


@attrs.frozen(kw_only=True)
class ChatLogprobs:
    content: list[ChatTokenLogprob]


@attrs.frozen(kw_only=True)
class ChatAnswer:
    role: Literal["assistant"]
    content: str


@attrs.frozen(kw_only=True)
class ChatChoice:
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None


@attrs.frozen(kw_only=True)
class ChatResponse:
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


@attrs.frozen(kw_only=True)
class ChatDelta:
    role: Literal["assistant"] | None = None
    content: str | None = None


@attrs.frozen(kw_only=True)
class ChatChunkChoice:
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


@attrs.frozen(kw_only=True)
class ChatChunk:
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


@attrs.frozen(kw_only=True)
class ModelCard:
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


@attrs.frozen(kw_only=True)
class ModelList:
    object: Literal["list"]
    data: list[ModelCard]


@attrs.frozen(kw_only=True)
class GenerateMeta:
    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    output_token_logprobs: list[tuple[float, int, str | None]] | None = None
    output_top_logprobs: list[list[tuple[float, int, str | None]]] | None = None


@attrs.frozen(kw_only=True)
class GenerateResponse:
    """Answer of ``/generate``; in a stream each chunk holds everything so far, as SGLang's does."""

    text: str
    output_ids: list[int]
    meta_info: GenerateMeta
    index: int | None = None


@attrs.frozen(kw_only=True)
class TokenizeResponse:
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


@attrs.frozen(kw_only=True)
class TokenizerInfoResponse:
    """Under the names of ``tokenizer_config.json``."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


@attrs.frozen(kw_only=True)
class DetokenizeResponse:
    prompt: str


@attrs.frozen(kw_only=True)
class ReplicaHealth:
    dp_rank: int
    state: str
    since: float
    """Unix seconds."""


@attrs.frozen(kw_only=True)
class HealthResponse:
    status: Literal["ok", "degraded", "stuck", "starting", "draining", "failed"]
    replicas: list[ReplicaHealth]


@attrs.frozen(kw_only=True)
class ReplicaLoadEntry:
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    attention_pairs: int
    kv_cache_usage: float
    in_flight: int
    step: int


@attrs.frozen(kw_only=True)
class LoadsResponse:
    loads: list[ReplicaLoadEntry]
