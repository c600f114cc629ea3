"""Plugin ``global`` of the point ``eplb_algo``."""

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
    """A planner that spreads replicas over all GPUs alike."""
    from crossdock.options import read_options

    from crossdock_eplb_algos.eplb_algo.global_.options import GlobalOptions
    from crossdock_eplb_algos.eplb_algo.global_.planner import GlobalPlanner

    return GlobalPlanner(read_options(GlobalOptions, options, where="[eplb_algo]"))


@hookimpl
def eplb_algo_capabilities(options: Mapping[str, object], env: Environment) -> EplbAlgoCapabilities | Refusal | None:
    """Needs a load; does not look at the placement in force."""
    from crossdock.options import read_options
    from crossdock.types.capability import EplbAlgoCapabilities

    from crossdock_eplb_algos.eplb_algo.global_.options import GlobalOptions

    read_options(GlobalOptions, options, where="[eplb_algo]")
    return EplbAlgoCapabilities()
