"""Entry point of the ``deepep`` dispatcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.options import read_options

from crossdock_dispatchers.deepep.capabilities import deepep_answer
from crossdock_dispatchers.deepep.options import DeepEpOptions

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.dispatch import Dispatcher, DispatcherCapabilities, DispatcherSpec

HOOK_API_VERSION = 1


@hookimpl
def make_dispatcher(options: Mapping[str, object], spec: DispatcherSpec) -> Dispatcher | None:
    """A dispatcher over ``deep_ep.Buffer``. Declines off CUDA and when the expert group is not all ranks."""
    chosen = read_options(DeepEpOptions, options, where="[dispatcher]")
    if spec.device.type != "cuda" or spec.sizes.moe_ep_size != spec.sizes.ranks:
        return None
    from crossdock_dispatchers.deepep.dispatcher import DeepEpDispatcher
    from crossdock_dispatchers.deepep.library import load_deep_ep, world_group

    return DeepEpDispatcher(spec, chosen, load_deep_ep(), world_group())


@hookimpl
def dispatcher_capabilities(options: Mapping[str, object], env: Environment) -> DispatcherCapabilities | Refusal | None:
    """Rank-local rows in and out, owing nothing; CUDA, bfloat16, both protocols or one."""
    return deepep_answer(read_options(DeepEpOptions, options, where="[dispatcher]"), env)
