"""The client's id of the request that the current task handles; also bound to every log line of that task."""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar

import structlog

REQUEST_ID_HEADER = "X-Request-Id"
_FORM = re.compile(r"^[\x21-\x7e]{1,200}$")
_CURRENT: ContextVar[str] = ContextVar("crossdock_request_id", default="")


def request_id() -> str:
    """The id of the request at hand; empty outside of one."""
    return _CURRENT.get()


def set_request_id(wanted: str) -> None:
    """Takes the client's id where it is printable ASCII of at most 200 characters, else draws one."""
    chosen = wanted if _FORM.match(wanted) else uuid.uuid4().hex
    _CURRENT.set(chosen)
    structlog.contextvars.bind_contextvars(request_id=chosen)
