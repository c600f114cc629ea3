"""The aiohttp application: routes, request ids, API keys, one error shape."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from crossdock.errors import CrossdockError, RequestError
from crossdock.serving.frontend import FRONTEND, Frontend
from crossdock.serving.http_errors import error_response, http_exception_response, request_error_response
from crossdock.serving.http_io import error_status
from crossdock.serving.openapi import openapi_document
from crossdock.serving.request_ids import REQUEST_ID_HEADER, request_id, set_request_id
from crossdock.serving.routes import Route, all_routes

_LOG = structlog.get_logger("crossdock.server")
OPENAPI_PATH = "/openapi.json"


def make_app(frontend: Frontend) -> web.Application:
    """The application that serves ``frontend``; bodies up to ``frontend.max_body_bytes``."""
    routes = all_routes()
    app = web.Application(
        client_max_size=frontend.max_body_bytes,
        middlewares=[_identified, _answered, _authorised(frontend, routes)],
    )
    app[FRONTEND] = frontend
    for route in routes:
        for method in route.methods:
            if method == "GET":
                app.router.add_get(route.path, route.handler)
            else:
                app.router.add_route(method, route.path, route.handler)
    document = msgspec.json.encode(openapi_document(routes, with_api_keys=bool(frontend.api_keys)))

    async def get_openapi(request: web.Request) -> web.Response:
        return web.Response(body=document, content_type="application/json")

    app.router.add_get(OPENAPI_PATH, get_openapi)
    return app


@web.middleware
async def _identified(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives each request an id: the client's ``X-Request-Id`` where it is usable; every answer carries it."""
    set_request_id(request.headers.get(REQUEST_ID_HEADER, ""))
    response = await handler(request)
    if not response.prepared:
        response.headers[REQUEST_ID_HEADER] = request_id()
    return response


@web.middleware
async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error in one shape, 404, 405 and 413 included."""
    frontend = request.app[FRONTEND]
    try:
        return await handler(request)
    except web.HTTPException as error:
        response = http_exception_response(error, request, frontend.max_body_bytes)
    except RequestError as error:
        response = request_error_response(error)
    except CrossdockError as error:
        _LOG.error("request failed", path=request.path, reason=str(error))
        response = error_response(str(error), status=error_status(error), headers={"Retry-After": "10"})
    except ConnectionError:
        raise  # the client is gone; there is nobody to answer
    except Exception:  # noqa: BLE001 - whatever a handler raises, the client gets the one error shape
        _LOG.exception("request failed", path=request.path)
        message = f"internal error; the server's log has it under request id {request_id()}"
        response = error_response(message, status=500)
    frontend.metrics.http_error(response.status)
    return response


def _authorised(frontend: Frontend, routes: Sequence[Route]) -> Middleware:
    open_paths = {route.path for route in routes if route.is_open}
    keys = tuple(key.encode() for key in frontend.api_keys)

    @web.middleware
    async def authorised(request: web.Request, handler: Handler) -> web.StreamResponse:
        """``Authorization: Bearer KEY`` on everything but probes and metrics, where the server has keys."""
        if keys and request.path not in open_paths and not _has_key(request, keys):
            message = "the API key is absent or wrong; send 'Authorization: Bearer KEY'"
            return error_response(message, status=401, headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return authorised


def _has_key(request: web.Request, keys: Sequence[bytes]) -> bool:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    sent = given.strip().encode("utf-8", "surrogateescape")
    # Every key is compared, so that the time does not tell which one was close.
    matches = [hmac.compare_digest(sent, key) for key in keys]
    return scheme.lower() == "bearer" and any(matches)
