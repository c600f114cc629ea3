"""From TOML, ``--set`` and flags to a ``Config`` that knows where each value came from.

Order: defaults < file < ``--set`` < flags. A layer is what somebody wrote, so a flag that repeats a default still wins over the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import attrs

from crossdock.config import CHOICE_POINTS, Config, ObserverConfig, PluginChoice
from crossdock.config_rules import rule_problems
from crossdock.errors import ConfigFileError, ConfigValueError
from crossdock.options import nearest, try_read_options

Table = dict[str, Any]


@attrs.frozen(kw_only=True)
class Layer:
    """Values that one place states: a nested table, and how a message and ``config show`` name the place."""

    source: str
    table: Table


@attrs.frozen(kw_only=True)
class LoadedConfig:
    """A config, and the source of every value that is not a default."""

    config: Config
    sources: Mapping[str, str]
    """Dotted path -> ``file x.toml``, ``--set``, ``--attn-dp``; a path that is absent holds the default."""


def file_layer(path: str | Path) -> Layer:
    """The tables of a TOML file; an empty file is an empty layer.

    Raises:
        ConfigFileError: no such file, a folder, unreadable, not UTF-8, or a syntax error (with line and column).
    """
    place = Path(path)
    if place.is_dir():
        raise ConfigFileError(f"config {place} is a folder; give the TOML file in it")
    try:
        table = tomllib.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigFileError(f"config {place} does not exist") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigFileError(f"config {place} is not TOML: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"config {place} cannot be read: {error}") from error
    return Layer(source=f"file {place}", table=table)


def set_layer(assignments: Sequence[str]) -> Layer:
    """``a.b=value`` words of ``--set``; a value that is no TOML value is taken as a string.

    Raises:
        ConfigValueError: a word has no ``=`` or no key.
    """
    table: Table = {}
    problems: list[str] = []
    for word in assignments:
        path, equals, text = word.partition("=")
        keys = [key.strip() for key in path.split(".")]
        if not equals or not all(keys):
            problems.append(
                f"--set {word!r}: write it as table.key=value, for instance --set scheduler.chunk_tokens=256"
            )
        elif not _assign(table, keys, _toml_value(text.strip())):
            problems.append(f"--set {word!r}: another --set gives {path.rpartition('.')[0]} a value that is no table")
    if problems:
        raise ConfigValueError(problems)
    return Layer(source="--set", table=table)


def flag_layers(flags: Mapping[str, tuple[str, object]]) -> tuple[Layer, ...]:
    """One layer a flag: ``flags`` maps the flag's spelling to (dotted path, value); only flags that were given belong in it."""
    layers: list[Layer] = []
    for spelling, (path, value) in flags.items():
        table: Table = {}
        _assign(table, path.split("."), value)
        layers.append(Layer(source=spelling, table=table))
    return tuple(layers)


def load_config(layers: Sequence[Layer] = ()) -> LoadedConfig:
    """The config of these layers, the later the stronger.

    Naming another plugin in a later layer drops the options that earlier layers gave beside another name: they were that plugin's.

    Raises:
        ConfigValueError: every unknown key and every wrong value, each with its path, its source and a suggestion.
    """
    merged: Table = {}
    sources: dict[str, str] = {}
    for layer in layers:
        _drop_foreign_options(merged, sources, layer.table)
        _merge(merged, layer.table, layer.source, sources, "")
    config, failed, problems = _structure(merged)
    problems.extend(rule_problems(config, skip=failed))
    if problems:
        raise ConfigValueError([_with_source(problem, sources) for problem in problems])
    return LoadedConfig(config=config, sources=sources)


def _toml_value(text: str) -> object:
    # No option takes a list of lists: it is an inline JSON text, a placement for instance.
    if text.replace(" ", "").startswith("[["):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _assign(table: Table, keys: Sequence[str], value: object) -> bool:
    """Puts a value under nested keys; False when a key on the way holds a value already."""
    for key in keys[:-1]:
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            return False
        table = cast("Table", inner)
    table[keys[-1]] = value
    return True


def _merge(into: Table, table: Mapping[str, Any], source: str, sources: dict[str, str], prefix: str) -> None:
    for key, value in table.items():
        path = f"{prefix}{key}"
        present = into.get(key)
        if isinstance(value, dict) and (present is None or isinstance(present, dict)):
            _merge(into.setdefault(key, {}), cast("Table", value), source, sources, f"{path}.")
        else:
            into[key] = value
            sources[path] = source


def _drop_foreign_options(merged: Table, sources: dict[str, str], table: Mapping[str, Any]) -> None:
    for point in CHOICE_POINTS:
        new, old = table.get(point), merged.get(point)
        if not isinstance(new, dict) or not isinstance(old, dict):
            continue
        new_name, old_name = (cast("Table", table).get("name") for table in (new, old))
        if None in (new_name, old_name) or new_name == old_name:
            continue
        merged[point] = {}
        for path in [path for path in sources if path.startswith(f"{point}.")]:
            del sources[path]


def _structure(merged: Mapping[str, Any]) -> tuple[Config, frozenset[str], list[str]]:
    """A config from raw tables, with the defaults in place of the tables that have a problem; their names; the problems."""
    values: Table = {}
    failed: set[str] = set()
    problems: list[str] = []
    known = {field.name: field for field in attrs.fields(Config)}
    defaults = Config()
    for name, raw in merged.items():
        if name not in known:
            problems.append(f"[{name}]: no such table{nearest(name, tuple(known))}; there are: {', '.join(known)}")
        elif not isinstance(raw, dict):
            problems.append(f"[{name}]: expected a table, found {raw!r}; write [{name}] with keys under it")
        elif name in CHOICE_POINTS:
            values[name] = _choice(name, cast("Table", raw), defaults, problems)
        elif name == "observer":
            values[name] = _observers(cast("Table", raw), problems)
        else:
            table_class = cast("type[object]", type(getattr(defaults, name)))
            value, found = try_read_options(table_class, cast("Table", raw), where=f"[{name}]")
            problems.extend(found)
            if value is None:
                failed.add(name)
            else:
                values[name] = value
    return Config(**values), frozenset(failed), problems


def _choice(point: str, raw: Table, defaults: Config, problems: list[str]) -> PluginChoice:
    default: PluginChoice = getattr(defaults, point)
    options = dict(raw)
    name = options.pop("name", default.name)
    if not isinstance(name, str) or not name:
        problems.append(f"[{point}] name: expected the name of a {point} plugin, found {name!r}")
        name = default.name
    return PluginChoice(name=name, options=options)


def _observers(raw: Table, problems: list[str]) -> ObserverConfig:
    options = dict(raw)
    names = options.pop("names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in cast("list[object]", names)):
        problems.append(f"[observer] names: expected a list of names, found {names!r}")
        names = []
    for key, value in options.items():
        if not isinstance(value, dict):
            problems.append(f"[observer] {key}: expected a table with the options of observer {key!r}, found {value!r}")
    return ObserverConfig(names=tuple(cast("list[str]", names)), options=options)


def _with_source(problem: str, sources: Mapping[str, str]) -> str:
    """Adds where the value was written, when the problem is about one value."""
    place, _, _ = problem.partition(":")
    table, _, key = place.replace("[", "").partition("]")
    path = f"{table}.{key.strip()}" if key.strip() else table
    inner = [source for known, source in sources.items() if known == path or known.startswith(f"{path}.")]
    distinct = list(dict.fromkeys(inner))
    return f"{problem} (from {', '.join(distinct)})" if distinct else problem
