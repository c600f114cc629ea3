"""Entry point of the ``locality`` replica picker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.options import read_options

from crossdock_eplb_algos.expert_location.locality.capabilities import LOCALITY_CAPABILITIES
from crossdock_eplb_algos.expert_location.locality.options import LocalityOptions

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.location import Picker, PickerCapabilities, PickerSpec

HOOK_API_VERSION = 1


@hookimpl
def make_expert_location(options: Mapping[str, object], spec: PickerSpec) -> Picker | None:
    """Each batch split over replicas by load and way together."""
    chosen = read_options(LocalityOptions, options, where="[expert_location]")
    from crossdock_eplb_algos.expert_location.locality.picker import LocalityPicker

    return LocalityPicker(spec, chosen)


@hookimpl
def expert_location_capabilities(
    options: Mapping[str, object], env: Environment
) -> PickerCapabilities | Refusal | None:
    """The same pick on all ranks wherever they hold the same rows; one small collective a layer elsewhere."""
    read_options(LocalityOptions, options, where="[expert_location]")
    return LOCALITY_CAPABILITIES
