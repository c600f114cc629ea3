"""What is installed, read once for each state of ``sys.path``.

A start asks for a plugin of each point, and a search for alternatives for all of them; the standard library reads the metadata of every
distribution for each question, which is 8 ms of CPU. A folder's time of change is in the key, so a package that is installed, upgraded
or removed while the process runs is seen.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import pkgutil
import sys
from collections.abc import Mapping
from typing import TypeAlias

import attrs

from crossdock.hookapi import PROJECT

PathState: TypeAlias = tuple[tuple[str, int], ...]
"""Folders of ``sys.path`` in order, with their times of change in ns; -1 where there is none."""


@attrs.frozen(kw_only=True)
class FoundEntryPoint:
    """An entry point with the distribution that states it."""

    entry: importlib.metadata.EntryPoint
    distribution: str
    version: str


def entry_points(group: str) -> tuple[FoundEntryPoint, ...]:
    """Every entry point of one of our groups, sorted by name, then distribution; a name given twice appears twice."""
    return _our_entry_points(_path_state()).get(group, ())


def top_level_modules() -> frozenset[str]:
    """Names that an import would find; nothing is imported."""
    return _top_level_modules(_path_state())


def _path_state() -> PathState:
    return tuple((os.path.abspath(path), _changed_ns(path)) for path in sys.path)


def _changed_ns(path: str) -> int:
    try:
        return os.stat(path or os.curdir).st_mtime_ns
    except OSError:
        return -1


@functools.lru_cache(maxsize=1)
def _our_entry_points(_state: PathState) -> Mapping[str, tuple[FoundEntryPoint, ...]]:
    found = importlib.metadata.entry_points()
    return {
        group: tuple(
            sorted(
                map(_with_distribution, found.select(group=group)), key=lambda one: (one.entry.name, one.distribution)
            )
        )
        for group in found.groups
        if group.startswith(f"{PROJECT}.")
    }


def _with_distribution(entry: importlib.metadata.EntryPoint) -> FoundEntryPoint:
    if entry.dist is None:
        return FoundEntryPoint(entry=entry, distribution="unknown distribution", version="0")
    return FoundEntryPoint(entry=entry, distribution=entry.dist.name, version=entry.dist.version)


@functools.lru_cache(maxsize=1)
def _top_level_modules(_state: PathState) -> frozenset[str]:
    return frozenset(module.name for module in pkgutil.iter_modules())
