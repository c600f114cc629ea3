"""Entry point of the ``sum_len`` padding policy."""

from __future__ import annotations

from collections.abc import Mapping

from crossdock.hookapi import hookimpl
from crossdock.options import read_options
from crossdock.types.capability import Environment, PaddingCapabilities, Refusal
from crossdock.types.padding import PaddingPolicy

from crossdock_attention.padding.sum_len.options import SumLenOptions
from crossdock_attention.padding.sum_len.policy import SumLenPadding

HOOK_API_VERSION = 1


@hookimpl
def make_padding(options: Mapping[str, object]) -> PaddingPolicy | None:
    """Always the sum of the counts, no padding beyond attention TP."""
    read_options(SumLenOptions, options, where="[padding]")
    return SumLenPadding()


@hookimpl
def padding_capabilities(options: Mapping[str, object], env: Environment) -> PaddingCapabilities | Refusal | None:
    """The modes that the policy may choose."""
    read_options(SumLenOptions, options, where="[padding]")
    return PaddingCapabilities(modes=frozenset({"sum_len"}))
