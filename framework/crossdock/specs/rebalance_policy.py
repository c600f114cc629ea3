"""Extension point ``rebalance_policy``: whether experts should move now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookspec

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, RebalancePolicyCapabilities, Refusal
    from crossdock.types.rebalance import RebalancePolicy


@hookspec(firstresult=True)
def make_rebalance_policy(options: Mapping[str, object]) -> RebalancePolicy | None:
    """First result. Decides, once at start on every rank, who answers whether a rebalance is worth its price.

    Args:
        options: the plugin's own table of the config without ``name``; host data, read with ``read_options``.

    Returns:
        A policy. ``choose(RebalanceFacts)`` gets host numbers that are equal on all ranks (steps, balancedness 0..1, seconds) and is pure.

    Declining: None when the options rule it out; the start then ends with ``PluginDeclined``.

    Raises:
        ConfigValueError: an option is unknown or has a wrong value.

    Source: the rebalance interval and utilisation threshold of SGLang's EPLB manager; the price is ours.
    """


@hookspec(firstresult=True)
def rebalance_policy_capabilities(
    options: Mapping[str, object], env: Environment
) -> RebalancePolicyCapabilities | Refusal | None:
    """First result. Decides, before weights are loaded and in the frontend too, whether a finished plan must be priced before the policy is asked.

    Args:
        options: the plugin's own table of the config without ``name``, as read from TOML; host data. The plugin reads it with
            ``crossdock.options.read_options``, which reports unknown keys and wrong values together.
        env: device name, parallel widths, dtype name, installed packages, model facts; host data, no device behind it.

    Returns:
        The capabilities that the object built from the same options will have, or a refusal with code and sentence.

    Declining: None means that it never asks for a priced plan.

    Raises:
        ConfigValueError: an option is unknown or has a wrong value.

    Cheap: imports neither torch nor an optional package; runs on a machine without the device.
    """
