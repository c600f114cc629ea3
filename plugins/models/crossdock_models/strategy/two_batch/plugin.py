"""Entry point of the ``two_batch`` strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.options import read_options

from crossdock_models.strategy.two_batch.options import TwoBatchOptions
from crossdock_models.strategy.two_batch.strategy import TwoBatch

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.strategy import Strategy, StrategyCapabilities

HOOK_API_VERSION = 1


@hookimpl
def make_strategy(options: Mapping[str, object]) -> Strategy | None:
    """Two micro-batches, where all replicas of a step prefill or all decode."""
    return TwoBatch(read_options(TwoBatchOptions, options, where="[strategy]"))


@hookimpl
def strategy_capabilities(options: Mapping[str, object], env: Environment) -> StrategyCapabilities | Refusal | None:
    """Two micro-batches on any device."""
    return read_options(TwoBatchOptions, options, where="[strategy]").capabilities(mixes_modes=False)
