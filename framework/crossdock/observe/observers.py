"""Typed entry to the ``observer`` point, which collects: every named observer is built and gets every event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from crossdock.errors import PluginDeclined
from crossdock.plugin_call import build
from crossdock.registry import load_plugin
from crossdock.types.observer import Observer, ObserverSpec


def make_observer(name: str, options: Mapping[str, object], spec: ObserverSpec) -> Observer | None:
    """The observer ``name``; None when it has nothing to observe on this rank.

    Raises:
        PluginError: it cannot be loaded, or returns an object without the protocol's methods.
        ConfigValueError: an option is wrong.
    """
    try:
        observer: Observer = build(load_plugin("observer", name), Observer, options=options, spec=spec)
    except PluginDeclined:
        return None
    return observer


def make_observers(
    names: Sequence[str], options: Mapping[str, Mapping[str, object]], spec: ObserverSpec
) -> tuple[Observer, ...]:
    """Every named observer that does not decline; raises as ``make_observer``."""
    made = (make_observer(name, options.get(name, {}), spec) for name in names)
    return tuple(observer for observer in made if observer is not None)
