"""Entry point of the ``nearly_equal`` padding policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.options import read_options
from crossdock.types.capability import PaddingCapabilities

from crossdock_outside.nearly_equal.options import NearlyEqualOptions
from crossdock_outside.nearly_equal.policy import NearlyEqual

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.padding import PaddingPolicy

HOOK_API_VERSION = 1


@hookimpl
def make_padding(options: Mapping[str, object]) -> PaddingPolicy | None:
    """Equal blocks where that costs little."""
    return NearlyEqual(read_options(NearlyEqualOptions, options, where="[padding]"))


@hookimpl
def padding_capabilities(options: Mapping[str, object], env: Environment) -> PaddingCapabilities | Refusal | None:
    """Either mode."""
    read_options(NearlyEqualOptions, options, where="[padding]")
    return PaddingCapabilities()
