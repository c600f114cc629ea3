"""Plugin ``crossdock`` of the point ``eplb_algo``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, EplbAlgoCapabilities, Refusal
    from crossdock.types.placement import EplbAlgo

HOOK_API_VERSION = 1


@hookimpl
def make_eplb_algo(options: Mapping[str, object]) -> EplbAlgo | None:
    """A planner that balances near the limit and moves little."""
    from crossdock.options import read_options

    from crossdock_eplb_algos.eplb_algo.crossdock.options import CrossdockOptions
    from crossdock_eplb_algos.eplb_algo.crossdock.planner import CrossdockPlanner

    return CrossdockPlanner(read_options(CrossdockOptions, options, where="[eplb_algo]"))


@hookimpl
def eplb_algo_capabilities(options: Mapping[str, object], env: Environment) -> EplbAlgoCapabilities | Refusal | None:
    """Plans around dead GPUs, from the placement in force."""
    from crossdock.options import read_options
    from crossdock.types.capability import EplbAlgoCapabilities

    from crossdock_eplb_algos.eplb_algo.crossdock.options import CrossdockOptions

    read_options(CrossdockOptions, options, where="[eplb_algo]")
    return EplbAlgoCapabilities(uses_current=True, supports_dead_gpus=True)
