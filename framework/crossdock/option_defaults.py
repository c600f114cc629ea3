"""The options of the plugins that a config names, defaults included: what each plugin reads when it is asked for its capabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from crossdock.compatibility import make_environment
from crossdock.config import AUTO, CHOICE_POINTS, Config
from crossdock.errors import CrossdockError
from crossdock.options import options_read
from crossdock.plain_value import plain_value
from crossdock.plugin_call import call_hook
from crossdock.registry import load_plugin
from crossdock.types.capability import Environment


def with_plugin_defaults(config: Config) -> Config:
    """``config`` with every option of its plugins. Options of a plugin that cannot be asked stay as they are stated: ``config validate`` says
    why. ``auto`` names no plugin, so it has no options of its own either."""
    env = make_environment(config)
    changes: dict[str, Any] = {}
    for point in CHOICE_POINTS:
        choice = getattr(config, point)
        if choice.name != AUTO:
            changes[point] = attrs.evolve(choice, options=_options(point, choice.name, choice.options, env))
    observer = config.observer
    observed = {
        name: _options("observer", name, observer.options.get(name, {}), env)
        for name in dict.fromkeys((*observer.names, *observer.options))
    }
    return attrs.evolve(config, observer=attrs.evolve(observer, options=_without_empty(observed)), **changes)


def _options(point: str, name: str, stated: Mapping[str, Any], env: Environment) -> dict[str, Any]:
    try:
        with options_read() as found:
            call_hook(load_plugin(point, name), f"{point}_capabilities", options=stated, env=env)
    except CrossdockError:
        return dict(stated)
    if not found:
        return dict(stated)
    # TOML has no null; an option without a value is left out, which is what its default means.
    return {key: value for key, value in plain_value(found[0]).items() if value is not None}


def _without_empty(tables: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: table for name, table in tables.items() if table}
