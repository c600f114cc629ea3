"""``/openapi.json``: OpenAPI 3.1 from the route table and the schemas that msgspec gives for the body classes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import msgspec

import crossdock
from crossdock.serving.protocol.responses import ErrorBody
from crossdock.serving.routes import Route

_REF = "#/components/schemas/{name}"
_STATUS_TEXT = {
    400: "The request is refused; the message names the field and the rule.",
    401: "The API key is absent or wrong.",
    404: "There is no such model or path.",
    409: "Another one is under way; try again when it has ended.",
    413: "The body is larger than the server's limit.",
    429: "Queues are full; see Retry-After.",
    503: "Starting, draining, stuck or failed; see Retry-After.",
}


def openapi_document(routes: Sequence[Route], *, with_api_keys: bool) -> dict[str, Any]:
    """The document of these routes."""
    classes = {cls for route in routes for cls in (route.body, route.response, route.chunk) if cls is not None}
    ordered = sorted({*classes, ErrorBody}, key=lambda cls: cls.__name__)
    _, schemas = msgspec.json.schema_components(ordered, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        for method in route.methods:
            paths.setdefault(route.path, {})[method.lower()] = _operation(route, method, with_api_keys=with_api_keys)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Crossdock", "version": crossdock.__version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if with_api_keys:
        document["components"]["securitySchemes"] = {"api_key": {"type": "http", "scheme": "bearer"}}
    return document


def _operation(route: Route, method: str, *, with_api_keys: bool) -> dict[str, Any]:
    summary = inspect.getdoc(route.handler) or ""
    name = re.sub(r"\W+", "_", route.path).strip("_")
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}_{name}",
        "summary": summary.splitlines()[0] if summary else name,
        "responses": {"200": {"description": "Success.", "content": _answers(route)}},
    }
    parameters = re.findall(r"{(\w+)}", route.path)
    if parameters:
        operation["parameters"] = [
            {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
            for parameter in parameters
        ]
    if route.body is not None and method == "POST":
        schema = {"$ref": _REF.format(name=route.body.__name__)}
        # What GET does without a body, POST does too.
        required = "GET" not in route.methods
        operation["requestBody"] = {"required": required, "content": {"application/json": {"schema": schema}}}
    errors = route.errors if route.is_open or not with_api_keys else (*route.errors, 401)
    for status in sorted(errors):
        operation["responses"][str(status)] = _error(route, status)
    if with_api_keys and not route.is_open:
        operation["security"] = [{"api_key": []}]
    return operation


def _answers(route: Route) -> dict[str, Any]:
    schema = {} if route.response is None else {"$ref": _REF.format(name=route.response.__name__)}
    content = {route.media_type: {"schema": schema}}
    if route.chunk is not None:
        content["text/event-stream"] = {"schema": {"$ref": _REF.format(name=route.chunk.__name__)}}
    return content


def _error(route: Route, status: int) -> dict[str, Any]:
    # Health and readiness say why in their own form.
    own_form = status == 503 and route.is_open
    schema: dict[str, Any] = {} if own_form else {"$ref": _REF.format(name=ErrorBody.__name__)}
    return {"description": _STATUS_TEXT[status], "content": {"application/json": {"schema": schema}}}
