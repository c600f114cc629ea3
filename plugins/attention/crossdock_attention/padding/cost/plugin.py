"""Entry point of the ``cost`` padding policy."""

from __future__ import annotations

from collections.abc import Mapping

from crossdock.hookapi import hookimpl
from crossdock.options import read_options
from crossdock.types.capability import Environment, PaddingCapabilities, Refusal
from crossdock.types.padding import PaddingPolicy

from crossdock_attention.padding.cost.options import CostOptions
from crossdock_attention.padding.cost.policy import CostPadding

HOOK_API_VERSION = 1


@hookimpl
def make_padding(options: Mapping[str, object]) -> PaddingPolicy | None:
    """Padding by cost: equal blocks unless the sum is much smaller."""
    read_options(CostOptions, options, where="[padding]")
    return CostPadding()


@hookimpl
def padding_capabilities(options: Mapping[str, object], env: Environment) -> PaddingCapabilities | Refusal | None:
    """The modes that the policy may choose."""
    read_options(CostOptions, options, where="[padding]")
    return PaddingCapabilities(modes=frozenset({"max_len", "sum_len"}))
