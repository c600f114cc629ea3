"""Entry point of the ``alltoallv`` dispatcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.options import read_options

from crossdock_dispatchers.alltoallv.capabilities import alltoallv_capabilities
from crossdock_dispatchers.alltoallv.options import AllToAllVOptions

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.dispatch import Dispatcher, DispatcherCapabilities, DispatcherSpec

HOOK_API_VERSION = 1


@hookimpl
def make_dispatcher(options: Mapping[str, object], spec: DispatcherSpec) -> Dispatcher | None:
    """A dispatcher over torch.distributed's variable all-to-all, gloo or NCCL. Declines when the expert group is not all ranks."""
    chosen = read_options(AllToAllVOptions, options, where="[dispatcher]")
    if spec.sizes.moe_ep_size != spec.sizes.ranks:
        return None
    from crossdock_dispatchers.alltoallv.dispatcher import AllToAllV

    return AllToAllV(spec, chosen)


@hookimpl
def dispatcher_capabilities(options: Mapping[str, object], env: Environment) -> DispatcherCapabilities | Refusal | None:
    """Rank-local rows in and out, owing nothing."""
    read_options(AllToAllVOptions, options, where="[dispatcher]")
    return alltoallv_capabilities(env.sizes)
