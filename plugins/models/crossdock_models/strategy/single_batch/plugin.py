"""Entry point of the ``single_batch`` strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.options import read_options
from crossdock.types.strategy import StrategyCapabilities

from crossdock_models.strategy.single_batch.options import SingleBatchOptions
from crossdock_models.strategy.single_batch.strategy import SingleBatch

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.strategy import Strategy

HOOK_API_VERSION = 1


@hookimpl
def make_strategy(options: Mapping[str, object]) -> Strategy | None:
    """One micro-batch with the shared experts behind a begin."""
    return SingleBatch(read_options(SingleBatchOptions, options, where="[strategy]"))


@hookimpl
def strategy_capabilities(options: Mapping[str, object], env: Environment) -> StrategyCapabilities | Refusal | None:
    """One micro-batch on any device."""
    read_options(SingleBatchOptions, options, where="[strategy]")
    return StrategyCapabilities()
