"""How single values of options are read: strictly, with the found value in each message."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, cast


def describe(value: object) -> str:
    """A found value and what it is, in the user's words."""
    words: dict[type[Any], str] = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "a table",
    }
    return f"{value!r} ({words.get(type(value), type(value).__name__)})"


def strict(kind: type[Any], accepted: tuple[type[Any], ...], wanted: str) -> Callable[[object, type[Any]], Any]:
    """A hook that takes a value only when it already has the type: no ``"4"`` for 4, no ``true`` for 1."""

    def structure(value: object, _: type[Any]) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise TypeError(f"expected {wanted}, found {describe(value)}")
        return kind(value)

    return structure


def structure_enum(value: object, kind: type[enum.Enum]) -> enum.Enum:
    """The member with exactly this value."""
    for member in kind:
        if type(member.value) is type(value) and member.value == value:
            return member
    listed = ", ".join(repr(member.value) for member in kind)
    raise ValueError(f"expected one of {listed}, found {value!r}")


def structure_mapping(value: object, kind: Any) -> dict[str, Any]:
    """A table whose keys belong to somebody else."""
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a table, found {describe(value)}")
    return dict(cast("Mapping[str, Any]", value))
