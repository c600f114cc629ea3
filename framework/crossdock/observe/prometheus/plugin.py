"""Entry point of the ``prometheus`` observer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.observe.prometheus.options import PrometheusOptions
from crossdock.options import read_options

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, ObserverCapabilities, Refusal
    from crossdock.types.observer import Observer, ObserverSpec

HOOK_API_VERSION = 1


@hookimpl
def make_observer(options: Mapping[str, object], spec: ObserverSpec) -> Observer | None:
    """One text file for this rank; declines when no folder is configured."""
    chosen = read_options(PrometheusOptions, options, where="[observer.prometheus]")
    folder = chosen.folder or spec.output_folder
    if folder is None:
        return None
    from crossdock.observe.prometheus.observer import PrometheusObserver

    return PrometheusObserver(folder, spec.rank, chosen.every_steps)


@hookimpl
def observer_capabilities(options: Mapping[str, object], env: Environment) -> ObserverCapabilities | Refusal | None:
    """All events."""
    read_options(PrometheusOptions, options, where="[observer.prometheus]")
    return None
