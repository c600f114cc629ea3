"""What every generating handler does: read the body, answer JSON, stream events with errors in their place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
import structlog
from aiohttp import web

from crossdock.errors import CrossdockError, RequestError, RuntimeFault
from crossdock.serving.choices import ChoiceDelta
from crossdock.serving.frontend import FRONTEND, Frontend
from crossdock.serving.generation import GenerationPlan
from crossdock.serving.request_body import read_body
from crossdock.serving.request_ids import REQUEST_ID_HEADER, request_id
from crossdock.serving.sse import EventStream

HEALTH_CHECK_HEADER = "X-Health-Check"
"""A client that sends it with value 1 is a probe: its tokens stay out of load statistics and metrics."""

Body = TypeVar("Body")
_LOG = structlog.get_logger("crossdock.server")


async def typed_body(request: web.Request, cls: type[Body]) -> Body:
    """The JSON body as ``cls``; raises ``RequestError`` with field and rule."""
    try:
        raw = await request.read()
    except web.RequestPayloadError as error:  # a Content-Encoding that the bytes do not have, for instance
        raise RequestError(f"the body cannot be read: {' '.join(str(error).split())}") from error
    return read_body(raw, cls, request.app[FRONTEND].unknown_keys)


def json_response(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """An attrs value or plain data as JSON."""
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def is_health_check(request: web.Request) -> bool:
    """The client says that it is a probe."""
    return request.headers.get(HEALTH_CHECK_HEADER) == "1"


async def collected(
    frontend: Frontend, plan: GenerationPlan, request: web.Request, take: Callable[[ChoiceDelta], None]
) -> None:
    """Runs a plan to its end, giving every delta to ``take``. The client's hanging up cancels and aborts."""
    with frontend.running(plan.request_id, request_id()):
        async with contextlib.aclosing(frontend.deltas(plan)) as batches:
            async for batch in batches:
                for delta in batch:
                    take(delta)


async def streamed(
    frontend: Frontend,
    plan: GenerationPlan,
    request: web.Request,
    events: Callable[[list[ChoiceDelta]], Iterable[Any]],
    last_events: Callable[[], Iterable[Any]],
) -> web.StreamResponse:
    """Streams a plan: ``events`` of each batch of deltas, ``last_events`` after the last, then ``[DONE]``.

    An error before the first event is raised (a plain HTTP error); a later one is sent as an event.
    """
    stream = EventStream(request=request, headers={REQUEST_ID_HEADER: request_id()})
    try:
        with frontend.running(plan.request_id, request_id()):
            async with contextlib.aclosing(frontend.deltas(plan)) as batches:
                async for batch in batches:
                    await stream.begin()
                    await stream.send(events(batch))
        await stream.send(last_events())
        return await stream.finish()
    except CrossdockError as error:
        if not stream.has_started:
            raise
        field = error.field if isinstance(error, RequestError) else None
        return await stream.fail(str(error), status=error_status(error), param=field)


def error_status(error: CrossdockError) -> int:
    """HTTP status of one of our errors: a broken engine is 503, since a restart by the operator helps."""
    if isinstance(error, RequestError):
        return error.http_status
    return 503 if isinstance(error, RuntimeFault) else 500
