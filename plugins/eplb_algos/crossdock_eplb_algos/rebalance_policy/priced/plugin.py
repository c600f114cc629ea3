"""Entry point of the ``priced`` rebalance policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.options import read_options

from crossdock_eplb_algos.rebalance_policy.priced.options import PricedOptions

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, RebalancePolicyCapabilities, Refusal
    from crossdock.types.rebalance import RebalancePolicy

HOOK_API_VERSION = 1


@hookimpl
def make_rebalance_policy(options: Mapping[str, object]) -> RebalancePolicy | None:
    """Yes when a plan is worth more than its price."""
    chosen = read_options(PricedOptions, options, where="[rebalance_policy]")
    from crossdock_eplb_algos.rebalance_policy.priced.policy import PricedPolicy

    return PricedPolicy(chosen)


@hookimpl
def rebalance_policy_capabilities(
    options: Mapping[str, object], env: Environment
) -> RebalancePolicyCapabilities | Refusal | None:
    """Asks for a plan with gain and price before it answers."""
    from crossdock.types.capability import RebalancePolicyCapabilities

    read_options(PricedOptions, options, where="[rebalance_policy]")
    return RebalancePolicyCapabilities(needs_plan=True)
