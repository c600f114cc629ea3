"""What handlers share: the body with its type, JSON answers, the status of an error."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from aiohttp import web

from crossdock.errors import CrossdockError, RequestError, RuntimeFault
from crossdock.serving.frontend import FRONTEND
from crossdock.serving.request_body import read_body, read_exact_body

HEALTH_CHECK_HEADER = "X-Health-Check"
"""A client that sends it with value 1 is a probe: its tokens stay out of load statistics and metrics."""

Body = TypeVar("Body")


async def typed_body(request: web.Request, cls: type[Body]) -> Body:
    """The JSON body as ``cls``; raises ``RequestError`` with field and rule."""
    return read_body(await _read(request), cls, request.app[FRONTEND].unknown_keys)


async def exact_body(request: web.Request, cls: type[Body]) -> Body:
    """The same, and a key that ``cls`` does not have is an error too."""
    return read_exact_body(await _read(request), cls)


async def _read(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.RequestPayloadError as error:  # a Content-Encoding that the bytes do not have, for instance
        raise RequestError(f"the body cannot be read: {' '.join(str(error).split())}") from error


def json_response(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """An attrs value or plain data as JSON."""
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def is_health_check(request: web.Request) -> bool:
    """The client says that it is a probe."""
    return request.headers.get(HEALTH_CHECK_HEADER) == "1"


def error_status(error: CrossdockError) -> int:
    """HTTP status of one of our errors: a broken engine is 503, since a restart by the operator helps."""
    if isinstance(error, RequestError):
        return error.http_status
    return 503 if isinstance(error, RuntimeFault) else 500
