"""Typed entry to the ``dispatcher`` point: builds the chosen dispatcher and puts the core's guard around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.dispatch_capacity import check_capacity
from crossdock.errors import WrongPluginResult
from crossdock.plugin_call import build
from crossdock.registry import load_plugin
from crossdock.types.dispatch import Dispatcher

if TYPE_CHECKING:
    from crossdock.dispatch_guard import GuardedDispatcher
    from crossdock.types.dispatch import DispatcherSpec


def make_dispatcher(name: str, options: Mapping[str, object], spec: DispatcherSpec) -> GuardedDispatcher:
    """The dispatcher ``name`` for ``spec``, guarded against calls out of order, slots in use, wrong shapes and rows beyond its capacity.

    Raises:
        PluginError: it cannot be loaded, declines (an all-to-all dispatcher whose expert group is not all ranks), or returns an
            object without the protocol's methods.
        CapacityTooSmall: it cannot send ``spec.max_rows_per_rank`` rows.
        ConfigValueError: an option is wrong.
    """
    from crossdock.dispatch_guard import GuardedDispatcher

    dispatcher: Dispatcher = build(load_plugin("dispatcher", name), Dispatcher, options=options, spec=spec)
    capabilities = dispatcher.capabilities
    if spec.max_in_flight > capabilities.max_in_flight:
        raise WrongPluginResult(
            f"dispatcher {name!r} was asked for {spec.max_in_flight} micro-batches in flight and allows "
            f"{capabilities.max_in_flight}; take a strategy with fewer micro-batches"
        )
    check_capacity(name, capabilities, spec.max_rows_per_rank)
    return GuardedDispatcher(dispatcher, spec)
