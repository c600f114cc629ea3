"""Raw TOML tables become attrs options: strict about types, all errors at once, each with its path and a suggestion."""

from __future__ import annotations

import difflib
import enum
import types
import typing
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast, get_args, get_origin

import attrs
import cattrs
from cattrs import AttributeValidationNote
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError, IterableValidationError
from cattrs.gen import make_dict_structure_fn

from crossdock.errors import ConfigValueError
from crossdock.option_values import describe, strict, structure_enum, structure_mapping

T = TypeVar("T")
_READ: ContextVar[list[object] | None] = ContextVar("options_read", default=None)
HELP = "help"
"""Key of an attrs field's metadata that holds its one-line help."""


def option(help: str, **kwargs: Any) -> Any:
    """An attrs field with one line of help, for the reference pages and ``--help``."""
    return attrs.field(metadata={HELP: help}, **kwargs)


def option_help(field: attrs.Attribute[Any]) -> str:
    """The help line of a field, empty when it has none."""
    return str(field.metadata.get(HELP, ""))


def nearest(word: str, known: Sequence[str]) -> str:
    """`` (did you mean 'x'?)`` for the closest known word, else an empty string."""
    folded = {name.casefold().replace("-", "_"): name for name in known}
    close = difflib.get_close_matches(word.casefold().replace("-", "_"), folded, n=1, cutoff=0.6)
    return f" (did you mean {folded[close[0]]!r}?)" if close else ""


def read_options(options_class: type[T], options: Mapping[str, object], *, where: str) -> T:
    """An instance of ``options_class`` from a raw table.

    Args:
        options_class: an attrs class; fields without a default are required.
        options: the table as TOML gives it.
        where: how a message names the table, for instance ``[dispatcher]``.

    Raises:
        ConfigValueError: lists every unknown key (with the accepted ones and the nearest), every value of a wrong type and every
            value that a validator rejects.
    """
    value, problems = try_read_options(options_class, options, where=where)
    if problems or value is None:
        raise ConfigValueError(problems)
    seen = _READ.get()
    if seen is not None:
        seen.append(value)
    return value


@contextmanager
def options_read() -> Generator[list[object]]:
    """Collects what ``read_options`` returns in the block, so that a plugin's options can be shown without knowing their class."""
    found: list[object] = []
    token = _READ.set(found)
    try:
        yield found
    finally:
        _READ.reset(token)


def try_read_options(
    options_class: type[T], options: Mapping[str, object], *, where: str
) -> tuple[T | None, tuple[str, ...]]:
    """As ``read_options``, but hands back the problems, so that those of several tables can be reported together."""
    try:
        return _CONVERTER.structure(options, options_class), ()
    except Exception as error:  # noqa: BLE001 - cattrs raises what the hooks raise; all of it is the user's input
        return None, tuple(_problems(error, where))


def _problems(error: BaseException, where: str) -> list[str]:
    """Flat list of ``path: what is wrong`` from cattrs' tree of exceptions."""
    if isinstance(error, ClassValidationError | IterableValidationError):
        found: list[str] = []
        for inner in error.exceptions:
            found.extend(_problems(inner, _join(where, _note(inner))))
        return found
    if isinstance(error, ForbiddenExtraKeysError):
        known = accepted_keys(error.cl)
        listed = ", ".join(known) if known else "none"
        return [
            f"{where}: unknown key {key!r}{nearest(key, known)}; accepted: {listed}"
            for key in sorted(error.extra_fields)
        ]
    if isinstance(error, KeyError):
        return [f"{where}: this key is required"]
    return [f"{where}: {error}"]


def accepted_keys(options_class: type[Any]) -> tuple[str, ...]:
    """Keys that a table of this class takes."""
    return tuple(field.name for field in attrs.fields(options_class))


def _note(error: BaseException) -> str:
    """The field or index that cattrs attached to an inner exception."""
    for note in getattr(error, "__notes__", ()):
        name = getattr(note, "name", None)
        if name is not None:
            return str(name)
        index = getattr(note, "index", None)
        if index is not None:
            return f"[{index}]"
    return ""


def _join(where: str, name: str) -> str:
    if not name:
        return where
    return f"{where}{name}" if name.startswith("[") else f"{where} {name}" if where.endswith("]") else f"{where}.{name}"


def _structure_union(value: object, union: Any) -> Any:
    """``X | None`` and unions of scalars: the first member that takes the value as it is."""
    members = get_args(union)
    if value is None:
        if type(None) in members:
            return None
        raise TypeError("expected a value, found nothing")
    for member in members:
        if member is type(None):
            continue
        try:
            return _CONVERTER.structure(value, member)
        except (TypeError, ValueError):
            continue
    if len(members) == 2 and type(None) in members:
        return _CONVERTER.structure(value, members[0] if members[1] is type(None) else members[1])
    wanted = " or ".join(getattr(member, "__name__", str(member)) for member in members if member is not type(None))
    raise TypeError(f"expected {wanted}, found {describe(value)}")


def _structure_literal(value: object, literal: Any) -> Any:
    allowed = get_args(literal)
    for choice in allowed:
        if type(choice) is type(value) and choice == value:
            return choice
    if type(value) is int and str(value) in allowed:  # 0 of "auto", "0", "1": TOML and --set read a bare 0 as a number
        return str(value)
    listed = ", ".join(repr(choice) for choice in allowed)
    hint = nearest(value, [c for c in allowed if isinstance(c, str)]) if isinstance(value, str) else ""
    raise ValueError(f"expected one of {listed}, found {value!r}{hint}")


def _structure_tuple(value: object, kind: Any) -> tuple[Any, ...]:
    """``tuple[X, ...]`` from a TOML list; a bare string is a mistake, not a list of characters."""
    if not isinstance(value, list | tuple):
        raise TypeError(f"expected a list, found {describe(value)}")
    element_list: Any = types.GenericAlias(list, (get_args(kind)[0],))
    return tuple(_CONVERTER.structure(cast("Sequence[Any]", value), element_list))


def _attrs_hook(cls: type[Any], converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    generated = make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True)

    def structure(value: Any, kind: Any) -> Any:
        if not isinstance(value, Mapping):
            raise TypeError(f"expected a table, found {describe(value)}")
        table = cast("Mapping[str, Any]", value)
        try:
            return generated(table, kind)
        except ClassValidationError as error:
            raise _with_every_validator(error, cls, table, converter) from None

    return structure


def _with_every_validator(
    error: ClassValidationError, cls: type[Any], table: Mapping[str, Any], converter: cattrs.Converter
) -> ClassValidationError:
    """The same error with what the other validators say: construction stops at the first, and does not start after a wrong type."""
    kept = [inner for inner in error.exceptions if _note(inner) or isinstance(inner, ForbiddenExtraKeysError)]
    failed = {_note(inner) for inner in kept}
    rejected: list[Exception] = []
    for field in attrs.fields(cls):
        if field.validator is None or field.name not in table or field.name in failed:
            continue
        try:
            validate: Any = field.validator
            validate(None, field, converter.structure(table[field.name], field.type))
        except (ValueError, TypeError) as problem:
            problem.add_note(cast("Any", AttributeValidationNote)("rejected", field.name, field.type))
            rejected.append(problem)
        except AttributeError:  # a validator that looks at its siblings needs the finished object
            continue
    own = [inner for inner in error.exceptions if inner not in kept] if not rejected else []
    return error.derive([*kept, *rejected, *own])


def _origin(kind: Any) -> Any:
    return get_origin(kind)


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=True, forbid_extra_keys=True)
    by_predicate = converter.register_structure_hook_func
    converter.register_structure_hook(bool, strict(bool, (bool,), "true or false"))
    converter.register_structure_hook(int, strict(int, (int,), "an integer"))
    converter.register_structure_hook(float, strict(float, (int, float), "a number"))
    converter.register_structure_hook(str, strict(str, (str,), "a string"))
    by_predicate(lambda kind: _origin(kind) is typing.Literal, _structure_literal)
    by_predicate(lambda kind: isinstance(kind, type) and issubclass(kind, enum.Enum), structure_enum)
    by_predicate(lambda kind: _origin(kind) is tuple and get_args(kind)[-1] is Ellipsis, _structure_tuple)
    by_predicate(lambda kind: _origin(kind) in (Mapping, dict), structure_mapping)
    by_predicate(lambda kind: _origin(kind) in (typing.Union, types.UnionType), _structure_union)

    def attrs_factory(cls: type[Any]) -> Callable[[Any, Any], Any]:
        return _attrs_hook(cls, converter)

    converter.register_structure_hook_factory(attrs.has, attrs_factory)
    return converter


_CONVERTER = _make_converter()
