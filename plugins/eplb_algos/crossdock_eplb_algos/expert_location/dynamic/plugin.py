"""Entry point of the ``dynamic`` replica picker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.options import read_options

from crossdock_eplb_algos.expert_location.dynamic.capabilities import DYNAMIC_CAPABILITIES
from crossdock_eplb_algos.expert_location.dynamic.options import DynamicOptions

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.location import Picker, PickerCapabilities, PickerSpec

HOOK_API_VERSION = 1


@hookimpl
def make_expert_location(options: Mapping[str, object], spec: PickerSpec) -> Picker | None:
    """All replicas of an expert, evenly."""
    read_options(DynamicOptions, options, where="[expert_location]")
    from crossdock_eplb_algos.expert_location.dynamic.picker import DynamicPicker

    return DynamicPicker(spec)


@hookimpl
def expert_location_capabilities(
    options: Mapping[str, object], env: Environment
) -> PickerCapabilities | Refusal | None:
    """The same pick on all ranks wherever they hold the same rows."""
    read_options(DynamicOptions, options, where="[expert_location]")
    return DYNAMIC_CAPABILITIES
