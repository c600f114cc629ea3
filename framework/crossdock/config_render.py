"""A config as TOML that can be read back, with a comment where each value came from; and the difference of two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import tomlkit

from crossdock.config import CHOICE_POINTS, Config, ObserverConfig, PluginChoice
from crossdock.config_load import LoadedConfig
from crossdock.config_rules import parallel_sizes

DEFAULT = "default"
DERIVED = "derived"


def config_tables(config: Config) -> dict[str, dict[str, Any]]:
    """The config in the form of the TOML file: a point's options lie beside its ``name``."""
    tables: dict[str, dict[str, Any]] = {}
    for field in attrs.fields(Config):
        value = getattr(config, field.name)
        if isinstance(value, PluginChoice):
            tables[field.name] = {"name": value.name, **value.options}
        elif isinstance(value, ObserverConfig):
            tables[field.name] = {"names": list(value.names), **value.options}
        else:
            tables[field.name] = attrs.asdict(value)
    return tables


def resolved_config(config: Config) -> Config:
    """The config with the parallel widths that zeros stand for; reading it back resolves to the same."""
    sizes = parallel_sizes(config.parallel)
    return attrs.evolve(config, parallel=attrs.evolve(config.parallel, **attrs.asdict(sizes)))


def render_config(loaded: LoadedConfig, *, resolved: bool) -> str:
    """TOML text. ``resolved``: every value, defaults and derived widths included, each with its source; else what was stated.

    Names of points stay as configured (``auto`` is chosen where the ranks run, and is in the receipt).
    """
    stated = config_tables(loaded.config)
    tables = config_tables(resolved_config(loaded.config)) if resolved else stated
    document = tomlkit.document()
    for name, table in tables.items():
        rendered = tomlkit.table()
        for key, value in table.items():
            source = _source(loaded.sources, f"{name}.{key}")
            if source is None and not resolved:
                continue
            if isinstance(value, dict):
                rendered.append(key, _table(value, loaded.sources, f"{name}.{key}"))  # pyright: ignore[reportUnknownArgumentType]
                continue
            if source is None:
                source = DEFAULT if key == "name" or name not in CHOICE_POINTS else f"{DEFAULT} of {table['name']}"
            rendered.append(key, _item(value, DERIVED if value != stated[name][key] else source))
        if len(rendered):
            document.append(name, rendered)
    return tomlkit.dumps(document)


def config_differences(first: Config, second: Config) -> tuple[str, ...]:
    """One line a value that differs after resolving: ``path: a -> b``."""
    left, right = (config_tables(resolved_config(config)) for config in (first, second))
    return table_differences(left, right)


def table_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[str, ...]:
    """One line a value that differs between two nested tables: ``path: a -> b``."""
    left, right = _flat(first, ""), _flat(second, "")
    lines: list[str] = []
    for path in dict.fromkeys([*left, *right]):
        before, after = left.get(path, "unset"), right.get(path, "unset")
        if before != after:
            lines.append(f"{path}: {before!r} -> {after!r}")
    return tuple(lines)


def unused_points(config: Config) -> frozenset[str]:
    """Points whose plugin this config never loads: the policy while nothing is rebalanced, and the planner when the start is trivial, too."""
    if config.eplb.enabled:
        return frozenset()
    if config.eplb.init_location != "trivial":
        return frozenset({"rebalance_policy"})
    return frozenset({"eplb_algo", "rebalance_policy"})


def loaded_points(config: Config) -> tuple[str, ...]:
    """Points whose plugin a rank of this config loads, observers apart."""
    unused = unused_points(config)
    return tuple(point for point in CHOICE_POINTS if point not in unused)


def _item(value: object, comment: str) -> Any:
    item: Any = tomlkit.item(value)
    item.comment(comment)
    return item


def _table(values: Mapping[str, Any], sources: Mapping[str, str], path: str) -> Any:
    """A table inside one of the config's, an observer's options for instance: a comment for each of its values."""
    table = tomlkit.table()
    for key, value in values.items():
        inner = f"{path}.{key}"
        default = f"{DEFAULT} of {path.rpartition('.')[2]}"
        item = _table(value, sources, inner) if isinstance(value, dict) else _item(value, sources.get(inner, default))  # pyright: ignore[reportUnknownArgumentType]
        table.append(key, item)
    return table


def _source(sources: Mapping[str, str], path: str) -> str | None:
    if path in sources:
        return sources[path]
    inner = dict.fromkeys(source for known, source in sources.items() if known.startswith(f"{path}."))
    return ", ".join(inner) or None


def _flat(table: Mapping[str, Any], prefix: str) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))  # pyright: ignore[reportUnknownArgumentType]
        else:
            flat[f"{prefix}{key}"] = value
    return flat
