"""Verbs for operators: caches, aborts, expert recording."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import attrs
from aiohttp import web

from crossdock.errors import RequestError
from crossdock.serving.frontend import FRONTEND
from crossdock.serving.http_io import exact_body, json_response, typed_body
from crossdock.serving.protocol.requests import AbortBody, RecordBody
from crossdock.serving.status_routes import CONTROL_TIMEOUT_S

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def post_abort(request: web.Request) -> web.Response:
    """Ends a request by its id (the response's ``id`` or the ``X-Request-Id``), or all."""
    frontend = request.app[FRONTEND]
    body = await typed_body(request, AbortBody)
    if body.rid is None and not body.abort_all:
        raise RequestError("rid: give the id of a request, or abort_all true", field="rid")
    if body.abort_all:
        return json_response({"aborted": await frontend.engine.abort_matching(None)})
    ours = [ours for ours, clients in frontend.active.items() if body.rid in (ours, clients)]
    aborted = [await frontend.engine.abort_matching(request_id) for request_id in ours]
    return json_response({"aborted": sum(aborted)})


def control_handler(verb: str, body_class: type[Any] = RecordBody) -> Handler:
    """A handler that sends ``verb`` to all replica leaders and answers with their results."""

    async def handle(request: web.Request) -> web.Response:
        arguments: dict[str, Any] = {}
        if request.method == "POST":
            # A misspelt name would be a recording in the wrong place; other engines' profilers take more than ours.
            read = exact_body if body_class is RecordBody else typed_body
            body = await read(request, body_class)
            arguments = {name: value for name, value in attrs.asdict(body).items() if value is not None}
        replies = await request.app[FRONTEND].engine.call(verb, arguments, CONTROL_TIMEOUT_S)
        results = [{"rank": reply.rank, **reply.result} for reply in replies]
        return json_response({"status": "ok", "replicas": results})

    handle.__doc__ = f"Sends ``{verb}`` to every replica; answers with the result of each."
    return handle
