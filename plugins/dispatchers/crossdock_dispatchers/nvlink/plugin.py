"""Entry point of the ``nvlink`` dispatcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.options import read_options
from crossdock.types.capability import Refusal

from crossdock_dispatchers.nvlink.capabilities import nvlink_capabilities
from crossdock_dispatchers.nvlink.options import NvlinkOptions

if TYPE_CHECKING:
    from crossdock.types.capability import Environment
    from crossdock.types.dispatch import Dispatcher, DispatcherCapabilities, DispatcherSpec

HOOK_API_VERSION = 1


@hookimpl
def make_dispatcher(options: Mapping[str, object], spec: DispatcherSpec) -> Dispatcher | None:
    """A dispatcher that stores rows straight into its peers' memory. Declines off CUDA and when the expert group is not all ranks."""
    chosen = read_options(NvlinkOptions, options, where="[dispatcher]")
    if spec.device.type != "cuda" or spec.sizes.moe_ep_size != spec.sizes.ranks:
        return None
    from crossdock_dispatchers.nvlink.dispatcher import NvlinkDispatcher
    from crossdock_dispatchers.nvlink.symmetric import world_allocator

    return NvlinkDispatcher(spec, chosen, world_allocator(spec.device))


@hookimpl
def dispatcher_capabilities(options: Mapping[str, object], env: Environment) -> DispatcherCapabilities | Refusal | None:
    """Rank-local rows in and out, owing nothing; one node, CUDA, triton."""
    chosen = read_options(NvlinkOptions, options, where="[dispatcher]")
    if env.device == "cuda" and "triton" not in env.packages:
        return Refusal(
            code="package_missing", sentence="dispatcher nvlink needs triton, which CUDA builds of torch bring along"
        )
    if env.num_nodes > 1:
        return Refusal(
            code="one_nvlink_domain",
            sentence=f"dispatcher nvlink needs all ranks in one NVLink domain, got {env.num_nodes} nodes; choose deepep or alltoallv",
        )
    return nvlink_capabilities(env.sizes, chosen)
