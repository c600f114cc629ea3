"""Typed entry to the ``rebalance_policy`` point."""

from __future__ import annotations

from collections.abc import Mapping

from crossdock.plugin_call import build
from crossdock.registry import load_plugin
from crossdock.types.rebalance import RebalancePolicy


def make_rebalance_policy(name: str, options: Mapping[str, object]) -> RebalancePolicy:
    """The rebalance policy ``name``.

    Raises:
        PluginError: it cannot be loaded, declines, or returns an object without the protocol's methods.
        ConfigValueError: an option is wrong.
    """
    policy: RebalancePolicy = build(load_plugin("rebalance_policy", name), RebalancePolicy, options=options)
    return policy
