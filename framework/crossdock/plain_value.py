"""Values as JSON-ready plain data in one canonical form: equal values give equal text in every process."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, cast

import attrs


def plain_value(value: object) -> Any:
    """attrs values become tables, enums their values, sets sorted lists; scalars and strings stay. Mapping keys become strings.

    Raises:
        TypeError: the value is none of these (a tensor, a function).
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return plain_value(value.value)
    if attrs.has(type(value)):
        kind: Any = type(value)
        return {field.name: plain_value(getattr(value, field.name)) for field in attrs.fields(kind)}
    if isinstance(value, Mapping):
        table = cast("Mapping[object, object]", value)
        return {str(plain_value(key)): plain_value(inner) for key, inner in table.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain_value(inner) for inner in cast("frozenset[object]", value)), key=str)
    if isinstance(value, list | tuple):
        return [plain_value(inner) for inner in cast("list[object]", value)]
    raise TypeError(f"a {type(value).__name__} has no plain form")
