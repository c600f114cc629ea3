"""Entry point of the ``threshold`` rebalance policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.options import read_options

from crossdock_eplb_algos.rebalance_policy.threshold.options import ThresholdOptions

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, RebalancePolicyCapabilities, Refusal
    from crossdock.types.rebalance import RebalancePolicy

HOOK_API_VERSION = 1


@hookimpl
def make_rebalance_policy(options: Mapping[str, object]) -> RebalancePolicy | None:
    """Yes when balancedness is below the threshold."""
    chosen = read_options(ThresholdOptions, options, where="[rebalance_policy]")
    from crossdock_eplb_algos.rebalance_policy.threshold.policy import ThresholdPolicy

    return ThresholdPolicy(chosen.below)


@hookimpl
def rebalance_policy_capabilities(
    options: Mapping[str, object], env: Environment
) -> RebalancePolicyCapabilities | Refusal | None:
    """Asks for no plan before it answers."""
    from crossdock.types.capability import RebalancePolicyCapabilities

    read_options(ThresholdOptions, options, where="[rebalance_policy]")
    return RebalancePolicyCapabilities()
