"""Entry point of the ``by_layer`` strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.options import read_options

from crossdock_outside.by_layer.options import ByLayerOptions
from crossdock_outside.by_layer.strategy import CAPABILITIES, ByLayer

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.strategy import Strategy, StrategyCapabilities

HOOK_API_VERSION = 1


@hookimpl
def make_strategy(options: Mapping[str, object]) -> Strategy | None:
    """One stage a layer, two micro-batches in turn."""
    read_options(ByLayerOptions, options, where="[strategy]")
    return ByLayer()


@hookimpl
def strategy_capabilities(options: Mapping[str, object], env: Environment) -> StrategyCapabilities | Refusal | None:
    """Two micro-batches on any device."""
    read_options(ByLayerOptions, options, where="[strategy]")
    return CAPABILITIES
