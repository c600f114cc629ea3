"""Entry point of the ``sequential`` strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.options import read_options
from crossdock.types.strategy import StrategyCapabilities

from crossdock_models.strategy.sequential.options import SequentialOptions
from crossdock_models.strategy.sequential.strategy import SequentialStrategy

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.strategy import Strategy

HOOK_API_VERSION = 1


@hookimpl
def make_strategy(options: Mapping[str, object]) -> Strategy | None:
    """One stage that holds every op in declared order."""
    read_options(SequentialOptions, options, where="[strategy]")
    return SequentialStrategy()


@hookimpl
def strategy_capabilities(options: Mapping[str, object], env: Environment) -> StrategyCapabilities | Refusal | None:
    """One micro-batch on any device."""
    read_options(SequentialOptions, options, where="[strategy]")
    return StrategyCapabilities()
