"""Calls into a loaded plugin, for the typed entries of the points only; everybody else gets real types from those entries."""

from __future__ import annotations

from typing import Any, cast

from crossdock.errors import PluginDeclined, PluginImportFailed, WrongPluginResult
from crossdock.registry import LoadedPlugin, import_message, installed_names, plugin_label


def call_hook(plugin: LoadedPlugin, hook: str, **arguments: object) -> object | None:
    """The first result of a hook; None when the plugin declines or does not implement it.

    Raises:
        PluginImportFailed: a heavy import inside the hook failed; names the extra that would install what is missing.
    """
    try:
        return cast("object | None", getattr(plugin.relay, hook)(**arguments))
    except ImportError as error:
        raise PluginImportFailed(import_message(plugin, error)) from error


def build(plugin: LoadedPlugin, protocol: type[object], **arguments: object) -> Any:
    """The object that ``make_<point>`` returns, checked to have the protocol's methods.

    ``Any`` because a Protocol cannot be handed over as ``type[T]``; the typed entry states the real type.

    Raises:
        PluginDeclined: the hook returned None.
        WrongPluginResult: the object lacks methods of ``protocol``.
    """
    hook = f"make_{plugin.point}"
    result = call_hook(plugin, hook, **arguments)
    if result is None:
        raise PluginDeclined(
            f"{plugin_label(plugin)} declined: {hook} returned None for this configuration; choose another {plugin.point}"
            f" (installed: {installed_names(plugin.point)})"
        )
    missing = [name for name in _members(protocol) if not hasattr(type(result), name) and not hasattr(result, name)]
    if missing:
        raise WrongPluginResult(
            f"{plugin_label(plugin)}: {hook} returned a {type(result).__name__} without {', '.join(missing)}; "
            f"it must have the members of {protocol.__module__}.{protocol.__name__}"
        )
    return result


def _members(protocol: type[object]) -> tuple[str, ...]:
    return tuple(name for name in vars(protocol) if not name.startswith("_"))
