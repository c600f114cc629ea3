"""Finds, checks and loads the plugin of one point by name.

Loading keeps no state: the selected name's module is imported (once, by Python), checked against the point's specs in a manager of its
own, and handed back. A plugin that fails any check leaves nothing behind. Every process loads for itself: names and options travel, never
plugin objects.
"""

from __future__ import annotations

import importlib.metadata
import re
from types import ModuleType
from typing import Any

import attrs
import pluggy

from crossdock.errors import (
    CrossdockError,
    DuplicatePlugin,
    NoHookImplemented,
    PluginImportFailed,
    UnknownHook,
    UnknownPlugin,
    WrongHookApiVersion,
)
from crossdock.hookapi import HOOK_API_VERSION, PROJECT
from crossdock.installation import FoundEntryPoint, entry_points
from crossdock.options import nearest
from crossdock.points import POINTS, SPECS, hook_names


@attrs.frozen(kw_only=True)
class InstalledPlugin:
    """An entry point as its metadata states it; nothing was imported."""

    point: str
    name: str
    distribution: str
    version: str
    module_name: str


@attrs.frozen(kw_only=True, eq=False)
class LoadedPlugin:
    """A checked plugin. Only the typed entry of its point calls ``relay``."""

    point: str
    name: str
    distribution: str
    version: str
    api: int
    module_name: str
    relay: Any


def installed(point: str) -> tuple[InstalledPlugin, ...]:
    """Every plugin of a point by metadata, sorted by name, then distribution; a name given twice appears twice."""
    return tuple(_describe(point, found) for found in _entry_points(point))


def load_plugin(point: str, name: str) -> LoadedPlugin:
    """The plugin of ``point`` called ``name``, imported and checked.

    Raises:
        UnknownPlugin, DuplicatePlugin, PluginImportFailed, WrongHookApiVersion, UnknownHook, NoHookImplemented: in this order; nothing
            stays registered after any of them.
    """
    matching = _find(point, name)
    found = _describe(point, matching)
    module = _import(found, matching.entry)
    api = _checked_version(found, module)
    manager = _checked_manager(found, module)
    return LoadedPlugin(
        point=point,
        name=name,
        distribution=found.distribution,
        version=found.version,
        api=api,
        module_name=found.module_name,
        relay=manager.hook,
    )


def _entry_points(point: str) -> tuple[FoundEntryPoint, ...]:
    if point not in SPECS:
        raise UnknownPlugin(f"no extension point {point!r}{nearest(point, POINTS)}; there are: {', '.join(POINTS)}")
    return entry_points(f"{PROJECT}.{point}")


def _describe(point: str, found: FoundEntryPoint) -> InstalledPlugin:
    return InstalledPlugin(
        point=point,
        name=found.entry.name,
        distribution=found.distribution,
        version=found.version,
        module_name=found.entry.value,
    )


def installed_names(point: str) -> str:
    """Names of a point's plugins, each once, for messages."""
    return ", ".join(dict.fromkeys(found.entry.name for found in _entry_points(point))) or "none"


def _find(point: str, name: str) -> FoundEntryPoint:
    """Steps 1 and 2: the one entry point of this name."""
    present = _entry_points(point)
    matching = [found for found in present if found.entry.name == name]
    if not matching:
        known = tuple(dict.fromkeys(found.entry.name for found in present))
        raise UnknownPlugin(
            f"no {point} plugin {name!r}{nearest(name, known)}; installed: {', '.join(known) or 'none'}"
            " (a package that was changed must be installed again before its new entry points are seen)"
        )
    if len(matching) > 1:
        owners = " and ".join(f"{found.distribution} {found.version}" for found in matching)
        raise DuplicatePlugin(
            f"{point} plugin {name!r} is provided by {owners}; nothing was loaded: uninstall one or rename its entry point"
        )
    return matching[0]


def _import(found: InstalledPlugin, entry: importlib.metadata.EntryPoint) -> ModuleType:
    """Step 3. ``SystemExit`` counts as a failed import: a plugin must not end the program."""
    try:
        module = entry.load()
    except (Exception, SystemExit) as error:
        raise PluginImportFailed(import_message(found, error)) from error
    if not isinstance(module, ModuleType):
        raise PluginImportFailed(
            f"{plugin_label(found)}: entry point {found.module_name!r} must name a module, found a {type(module).__name__}"
        )
    return module


def _checked_version(found: InstalledPlugin, module: ModuleType) -> int:
    """Step 4."""
    api = getattr(module, "HOOK_API_VERSION", None)
    if api != HOOK_API_VERSION:
        stated = "states no HOOK_API_VERSION" if api is None else f"is written for hook API {api!r}"
        raise WrongHookApiVersion(
            f"{plugin_label(found)} {stated}, this is hook API {HOOK_API_VERSION}: install a release of {found.distribution}"
            f" for hook API {HOOK_API_VERSION}"
        )
    return int(api)


def _checked_manager(found: InstalledPlugin, module: ModuleType) -> pluggy.PluginManager:
    """Steps 5 and 6, in a manager that holds this point's specs and this plugin only."""
    specs = SPECS[found.point]
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(specs)
    try:
        manager.register(module, name=found.module_name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        hooks = ", ".join(hook_names(found.point))
        raise UnknownHook(
            f"{plugin_label(found)} does not fit the point's hooks ({hooks}): {_one_line(error)}"
        ) from error
    required = f"make_{found.point}"
    implemented = {caller.name for caller in manager.get_hookcallers(module) or ()}
    if required not in implemented:
        raise NoHookImplemented(
            f"{plugin_label(found)} implements no {required}: define it in {found.module_name} and mark it with"
            " crossdock.hookapi.hookimpl"
        )
    return manager


def plugin_label(plugin: InstalledPlugin | LoadedPlugin) -> str:
    """How a message names a plugin: point, name, distribution and version."""
    return f"{plugin.point} plugin {plugin.name!r} ({plugin.distribution} {plugin.version})"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def import_message(plugin: InstalledPlugin | LoadedPlugin, error: BaseException) -> str:
    """Why an import of a plugin failed, and the extra that would install what is missing."""
    what = _one_line(error) if isinstance(error, CrossdockError) else f"{type(error).__name__}: {_one_line(error)}"
    message = f"{plugin_label(plugin)} cannot be imported from {plugin.module_name}: {what}"
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    extra = _extra_for(plugin.distribution, missing) if missing else None
    if extra:
        return f"{message}; install it with: pip install '{plugin.distribution}[{extra}]'"
    return message


def _extra_for(distribution: str, module_name: str) -> str | None:
    """The extra of ``distribution`` whose requirement looks like the missing module, by name."""
    try:
        requirements = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    wanted = re.sub(r"[-_.]", "", module_name.partition(".")[0]).casefold()
    for requirement in requirements:
        match = re.match(r"([A-Za-z0-9._-]+).*;.*extra\s*==\s*['\"]([^'\"]+)['\"]", requirement)
        if match and wanted in re.sub(r"[-_.]", "", match[1]).casefold():
            return match[2]
    return None
