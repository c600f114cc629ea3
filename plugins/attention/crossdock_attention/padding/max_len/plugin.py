"""Entry point of the ``max_len`` padding policy."""

from __future__ import annotations

from collections.abc import Mapping

from crossdock.hookapi import hookimpl
from crossdock.options import read_options
from crossdock.types.capability import Environment, PaddingCapabilities, Refusal
from crossdock.types.padding import PaddingPolicy

from crossdock_attention.padding.max_len.options import MaxLenOptions
from crossdock_attention.padding.max_len.policy import MaxLenPadding

HOOK_API_VERSION = 1


@hookimpl
def make_padding(options: Mapping[str, object]) -> PaddingPolicy | None:
    """Always equal blocks."""
    read_options(MaxLenOptions, options, where="[padding]")
    return MaxLenPadding()


@hookimpl
def padding_capabilities(options: Mapping[str, object], env: Environment) -> PaddingCapabilities | Refusal | None:
    """The modes that the policy may choose."""
    read_options(MaxLenOptions, options, where="[padding]")
    return PaddingCapabilities(modes=frozenset({"max_len"}))
