"""Plugin ``elastic`` of the point ``eplb_algo``."""

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
    """A planner that leaves dead GPUs out."""
    from crossdock.options import read_options

    from crossdock_eplb_algos.eplb_algo.elastic.options import ElasticOptions
    from crossdock_eplb_algos.eplb_algo.elastic.planner import ElasticPlanner

    return ElasticPlanner(read_options(ElasticOptions, options, where="[eplb_algo]"))


@hookimpl
def eplb_algo_capabilities(options: Mapping[str, object], env: Environment) -> EplbAlgoCapabilities | Refusal | None:
    """Plans around dead GPUs and keeps what it can in place."""
    from crossdock.options import read_options
    from crossdock.types.capability import EplbAlgoCapabilities

    from crossdock_eplb_algos.eplb_algo.elastic.options import ElasticOptions

    read_options(ElasticOptions, options, where="[eplb_algo]")
    return EplbAlgoCapabilities(uses_current=True, supports_dead_gpus=True)
