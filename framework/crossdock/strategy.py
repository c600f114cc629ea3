"""Typed entry to the ``strategy`` point."""

from __future__ import annotations

from collections.abc import Mapping

from crossdock.plugin_call import build
from crossdock.registry import load_plugin
from crossdock.types.strategy import Strategy


def make_strategy(name: str, options: Mapping[str, object]) -> Strategy:
    """The strategy plugin ``name``.

    Raises:
        PluginError: it cannot be loaded, declines, or returns an object without the protocol's methods.
        ConfigValueError: an option is wrong.
    """
    strategy: Strategy = build(load_plugin("strategy", name), Strategy, options=options)
    return strategy
