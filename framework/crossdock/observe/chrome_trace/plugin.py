"""Entry point of the ``chrome_trace`` observer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.observe.chrome_trace.options import ChromeTraceOptions
from crossdock.options import read_options

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, ObserverCapabilities, Refusal
    from crossdock.types.observer import Observer, ObserverSpec

HOOK_API_VERSION = 1


@hookimpl
def make_observer(options: Mapping[str, object], spec: ObserverSpec) -> Observer | None:
    """One trace file for this rank; declines when no folder is configured."""
    chosen = read_options(ChromeTraceOptions, options, where="[observer.chrome_trace]")
    folder = chosen.folder or spec.output_folder
    if not folder:
        return None
    from crossdock.observe.chrome_trace.observer import ChromeTraceObserver

    return ChromeTraceObserver(folder, spec.rank, chosen.most_events)


@hookimpl
def observer_capabilities(options: Mapping[str, object], env: Environment) -> ObserverCapabilities | Refusal | None:
    """Every event."""
    from crossdock.types.capability import ObserverCapabilities

    read_options(ChromeTraceOptions, options, where="[observer.chrome_trace]")
    return ObserverCapabilities()
