"""JSON bodies to attrs classes: which field, which rule; keys nobody knows are ignored and logged once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import attrs
import msgspec
import structlog

from crossdock.errors import RequestError
from crossdock.options import nearest
from crossdock.serving.protocol.unsupported import refuse_unsupported

Body = TypeVar("Body")

_PLACE = re.compile(r"^(?P<rule>.*) - at `\$(?P<path>[^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]+)`$")
_LOG = structlog.get_logger("crossdock.server")


@attrs.define(kw_only=True)
class UnknownKeys:
    """Remembers which unknown keys were logged, so that a client that sends one with each request is logged once."""

    max_remembered: int = 1000
    _seen: set[tuple[str, str]] = attrs.Factory(set)

    def note(self, body: Mapping[str, Any], cls: type[Any]) -> None:
        """Logs each top-level key of ``body`` that ``cls`` does not have, the first time it is seen."""
        known = {field.name for field in attrs.fields(cls)}
        for key in body:
            place = (cls.__name__, key[:100])
            if key in known or place in self._seen or len(self._seen) >= self.max_remembered:
                continue
            self._seen.add(place)
            _LOG.info("unknown key ignored", body=cls.__name__, key=key[:100])


def read_body(raw: bytes, cls: type[Body], unknown_keys: UnknownKeys) -> Body:
    """The body as ``cls``; an empty body counts as ``{}``.

    Raises:
        RequestError: no JSON, no object, a wrong type, a value out of range, or a field of other servers that is not
            supported; ``field`` is the key's path.
    """
    decoded = _decoded(raw)
    body = _converted(decoded, cls)
    _refuse_unsupported(decoded, cls)
    unknown_keys.note(decoded, cls)
    return body


def read_exact_body(raw: bytes, cls: type[Body]) -> Body:
    """As ``read_body``, for verbs that change the server: a key that nobody knows is refused, because it may be a misspelt one."""
    decoded = _decoded(raw)
    known = [field.name for field in attrs.fields(cast("type[attrs.AttrsInstance]", cls))]
    for key in decoded:
        if key not in known:
            raise RequestError(
                f"{key[:100]}: there is no such field{nearest(key, known)}; fields are {', '.join(known)}",
                field=key[:100],
            )
    return _converted(decoded, cls)


def _decoded(raw: bytes) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(raw) if raw.strip() else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise RequestError(f"the body must be a JSON object, found {_kind(decoded)}")
    return decoded


def _converted(decoded: dict[str, Any], cls: type[Body]) -> Body:
    try:
        return msgspec.convert(decoded, cls)
    except msgspec.ValidationError as error:
        raise _request_error(str(error)) from error


def _refuse_unsupported(decoded: Mapping[str, Any], cls: type[Any]) -> None:
    refuse_unsupported(decoded, cls.__name__)
    nested = decoded.get("sampling_params")
    if isinstance(nested, dict):
        refuse_unsupported(nested, "GenerateSampling", "sampling_params.")


def _request_error(message: str) -> RequestError:
    place = _PLACE.match(message)
    rule, path = (place["rule"], place["path"].lstrip(".")) if place else (message, "")
    missing = _MISSING.match(rule)
    if missing:
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return RequestError(f"{name}: this field is required", field=name)
    rule = rule[:1].lower() + rule[1:]
    return RequestError(f"{path}: {rule}" if path else rule, field=path or None)


def _kind(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return next((name for kind, name in names.items() if type(value) is kind), "null")
