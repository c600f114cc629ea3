"""Entry point of the ``gather_scatter`` dispatcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.options import read_options

from crossdock_outside.gather_scatter.capabilities import gather_scatter_capabilities
from crossdock_outside.gather_scatter.options import GatherScatterOptions

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.dispatch import Dispatcher, DispatcherCapabilities, DispatcherSpec

HOOK_API_VERSION = 1


@hookimpl
def make_dispatcher(options: Mapping[str, object], spec: DispatcherSpec) -> Dispatcher | None:
    """Declines where peers of one expert shard would hold different rows."""
    read_options(GatherScatterOptions, options, where="[dispatcher]")
    if spec.sizes.moe_ep_size != spec.sizes.ranks:
        return None
    from crossdock_outside.gather_scatter.dispatcher import GatherScatter

    return GatherScatter(spec)


@hookimpl
def dispatcher_capabilities(options: Mapping[str, object], env: Environment) -> DispatcherCapabilities | Refusal | None:
    """The same on every layout that it serves."""
    read_options(GatherScatterOptions, options, where="[dispatcher]")
    return gather_scatter_capabilities(env.sizes)
