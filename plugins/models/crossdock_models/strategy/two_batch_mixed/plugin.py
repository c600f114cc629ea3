"""Entry point of the ``two_batch_mixed`` strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.options import read_options

from crossdock_models.strategy.two_batch_mixed.options import TwoBatchMixedOptions
from crossdock_models.strategy.two_batch_mixed.strategy import TwoBatchMixed

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.strategy import Strategy, StrategyCapabilities

HOOK_API_VERSION = 1


@hookimpl
def make_strategy(options: Mapping[str, object]) -> Strategy | None:
    """Two micro-batches in every step, mixed ones too."""
    return TwoBatchMixed(read_options(TwoBatchMixedOptions, options, where="[strategy]"))


@hookimpl
def strategy_capabilities(options: Mapping[str, object], env: Environment) -> StrategyCapabilities | Refusal | None:
    """Two micro-batches on any device."""
    return read_options(TwoBatchMixedOptions, options, where="[strategy]").capabilities(mixes_modes=True)
