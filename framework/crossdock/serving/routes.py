"""The route table: the application and ``/openapi.json`` are both made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import attrs
from aiohttp import web

from crossdock.serving.chat_completions import post_chat_completions
from crossdock.serving.completions import post_completions
from crossdock.serving.control_routes import control_handler, post_abort
from crossdock.serving.generate import post_generate
from crossdock.serving.model_routes import (
    get_model,
    get_model_info,
    get_models,
    get_tokenizer_info,
    post_detokenize,
    post_tokenize,
)
from crossdock.serving.placement_routes import (
    get_placement,
    get_placement_history,
    post_placement_apply,
    post_placement_plan,
    post_placement_reload,
)
from crossdock.serving.protocol import placement, requests, responses
from crossdock.serving.status_routes import (
    get_health,
    get_health_generate,
    get_loads,
    get_metrics,
    get_ping,
    get_ready,
    get_receipt,
    get_server_info,
    get_version,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_RECORD_VERBS = tuple(f"{verb}_expert_distribution_record" for verb in ("start", "stop", "dump"))


@attrs.frozen(kw_only=True)
class Route:
    """One endpoint."""

    path: str
    handler: Handler
    methods: tuple[str, ...] = ("GET",)
    body: type[Any] | None = None
    response: type[Any] | None = None
    """Class of the 200 answer; None: free-form JSON."""
    chunk: type[Any] | None = None
    """Class of a stream's events, for endpoints that stream."""
    media_type: str = "application/json"
    errors: tuple[int, ...] = ()
    is_open: bool = False
    """Answers without an API key."""


def all_routes() -> tuple[Route, ...]:
    """Every endpoint but ``/openapi.json`` itself."""
    return (*_generation_routes(), *_status_routes(), *_control_routes(), *_placement_routes())


def _generation_routes() -> tuple[Route, ...]:
    generating = (400, 413, 429, 503)
    return (
        Route(
            path="/v1/completions",
            handler=post_completions,
            methods=("POST",),
            body=requests.CompletionBody,
            response=responses.CompletionResponse,
            chunk=responses.CompletionResponse,
            errors=generating,
        ),
        Route(
            path="/v1/chat/completions",
            handler=post_chat_completions,
            methods=("POST",),
            body=requests.ChatBody,
            response=responses.ChatResponse,
            chunk=responses.ChatChunk,
            errors=generating,
        ),
        Route(
            path="/generate",
            handler=post_generate,
            methods=("POST",),
            body=requests.GenerateBody,
            chunk=responses.GenerateResponse,
            errors=generating,
        ),
        Route(path="/v1/models", handler=get_models, response=responses.ModelList),
        Route(path="/v1/models/{model}", handler=get_model, response=responses.ModelCard, errors=(404,)),
        Route(
            path="/tokenizer_info",
            handler=get_tokenizer_info,
            response=responses.TokenizerInfoResponse,
            errors=(404,),
        ),
        Route(
            path="/tokenize",
            handler=post_tokenize,
            methods=("POST",),
            body=requests.TokenizeBody,
            response=responses.TokenizeResponse,
            errors=(400, 413),
        ),
        Route(
            path="/detokenize",
            handler=post_detokenize,
            methods=("POST",),
            body=requests.DetokenizeBody,
            response=responses.DetokenizeResponse,
            errors=(400, 413),
        ),
    )


def _status_routes() -> tuple[Route, ...]:
    return (
        Route(path="/health", handler=get_health, response=responses.HealthResponse, errors=(503,), is_open=True),
        Route(path="/health_generate", handler=get_health_generate, response=responses.HealthResponse, errors=(503,)),
        Route(path="/ready", handler=get_ready, errors=(503,), is_open=True),
        Route(path="/ping", handler=get_ping, methods=("GET", "POST"), is_open=True),
        Route(path="/version", handler=get_version, is_open=True),
        Route(path="/metrics", handler=get_metrics, media_type="text/plain", is_open=True),
        Route(path="/server_info", handler=get_server_info),
        Route(path="/get_server_info", handler=get_server_info),
        Route(path="/model_info", handler=get_model_info),
        Route(path="/get_model_info", handler=get_model_info),
        Route(path="/v1/loads", handler=get_loads, response=responses.LoadsResponse),
        Route(path="/receipt", handler=get_receipt, errors=(503,)),
    )


def _placement_routes() -> tuple[Route, ...]:
    return (
        Route(path="/placement", handler=get_placement, errors=(503,)),
        Route(path="/placement/history", handler=get_placement_history, errors=(503,)),
        Route(
            path="/placement/plan",
            handler=post_placement_plan,
            methods=("POST",),
            body=placement.PlanPlacementBody,
            response=placement.PlanPlacementResponse,
            errors=(400, 409, 503),
        ),
        Route(
            path="/placement/apply",
            handler=post_placement_apply,
            methods=("POST",),
            body=placement.ApplyPlacementBody,
            response=placement.ApplyPlacementResponse,
            errors=(400, 409, 503),
        ),
        Route(path="/placement/reload", handler=post_placement_reload, methods=("POST",), errors=(400, 409, 503)),
    )


def _control_routes() -> tuple[Route, ...]:
    flush = control_handler("flush_cache")
    return (
        Route(path="/abort_request", handler=post_abort, methods=("POST",), body=requests.AbortBody, errors=(400,)),
        Route(path="/flush_cache", handler=flush, methods=("GET", "POST"), errors=(503,)),
        Route(path="/reset_prefix_cache", handler=flush, methods=("GET", "POST"), errors=(503,)),
        *(
            Route(
                path=f"/{verb}",
                handler=control_handler(verb),
                methods=("GET", "POST"),
                body=requests.RecordBody,
                errors=(400, 503),
            )
            for verb in _RECORD_VERBS
        ),
        *(
            Route(
                path=f"/{verb}",
                handler=control_handler(verb, requests.ProfileBody),
                methods=("GET", "POST"),
                body=requests.ProfileBody,
                errors=(400, 503),
            )
            for verb in ("start_profile", "stop_profile")
        ),
    )
