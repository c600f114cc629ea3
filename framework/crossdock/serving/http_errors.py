"""One shape for every error of the server: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from aiohttp import web

from crossdock.errors import OverloadedError, RequestError
from crossdock.serving.protocol.responses import ErrorBody, ErrorInfo

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "TooManyRequestsError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


def error_body(message: str, *, status: int, param: str | None = None) -> ErrorBody:
    """The body of one error; ``code`` repeats the HTTP status."""
    kind = _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return ErrorBody(error=ErrorInfo(message=message, type=kind, param=param, code=status))


def error_response(
    message: str, *, status: int, param: str | None = None, headers: Mapping[str, str] | None = None
) -> web.Response:
    """The error as a whole response."""
    body = msgspec.json.encode(error_body(message, status=status, param=param))
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def request_error_response(error: RequestError) -> web.Response:
    """A refused request, with ``Retry-After`` where trying again can help."""
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, OverloadedError) else None
    return error_response(str(error), status=error.http_status, param=error.field, headers=headers)


def http_exception_response(error: web.HTTPException, request: web.Request, max_body_bytes: int) -> web.Response:
    """aiohttp's own refusals (404, 405, 413, ...), which are plain text by default."""
    messages = {
        404: f"there is no {request.path}; GET /openapi.json lists what there is",
        405: f"{request.path} does not take {request.method}; allowed: {error.headers.get('Allow', 'see /openapi.json')}",
        413: f"the body is larger than this server's limit of {max_body_bytes} bytes (server.max_body_bytes)",
    }
    kept = {name: error.headers[name] for name in ("Allow", "Location") if name in error.headers}
    message = messages.get(error.status, error.reason or "error")
    return error_response(message, status=error.status, headers=kept)
