"""The extension points: the one place that lists them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Final

from crossdock.specs import (
    attention,
    dispatcher,
    eplb_algo,
    expert_location,
    experts,
    model,
    observer,
    padding,
    rebalance_policy,
    strategy,
)

SPECS: Final[Mapping[str, ModuleType]] = MappingProxyType(
    {
        "padding": padding,
        "dispatcher": dispatcher,
        "experts": experts,
        "strategy": strategy,
        "expert_location": expert_location,
        "eplb_algo": eplb_algo,
        "rebalance_policy": rebalance_policy,
        "attention": attention,
        "model": model,
        "observer": observer,
    }
)
"""Spec module of every extension point."""
POINTS: Final = tuple(SPECS)


def hook_names(point: str) -> tuple[str, ...]:
    """Names of the hooks that a point specifies."""
    return tuple(
        name for name in vars(SPECS[point]) if name.startswith("make_") or name.endswith(("_capabilities", "_info"))
    )
