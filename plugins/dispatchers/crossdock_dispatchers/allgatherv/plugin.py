"""Entry point of the ``allgatherv`` dispatcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.options import read_options

from crossdock_dispatchers.allgatherv.capabilities import allgatherv_capabilities
from crossdock_dispatchers.allgatherv.options import AllGatherVOptions

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.dispatch import Dispatcher, DispatcherCapabilities, DispatcherSpec

HOOK_API_VERSION = 1


@hookimpl
def make_dispatcher(options: Mapping[str, object], spec: DispatcherSpec) -> Dispatcher | None:
    """A dispatcher over rows that the boundary has gathered; any moe_ep x moe_tp."""
    read_options(AllGatherVOptions, options, where="[dispatcher]")
    from crossdock_dispatchers.allgatherv.dispatcher import AllGatherV

    return AllGatherV(spec)


@hookimpl
def dispatcher_capabilities(options: Mapping[str, object], env: Environment) -> DispatcherCapabilities | Refusal | None:
    """Full rows in and out, owing the sum over the ranks that hold experts."""
    read_options(AllGatherVOptions, options, where="[dispatcher]")
    return allgatherv_capabilities(env.sizes)
