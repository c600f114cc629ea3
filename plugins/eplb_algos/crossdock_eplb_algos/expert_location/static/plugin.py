"""Entry point of the ``static`` replica picker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.options import read_options

from crossdock_eplb_algos.expert_location.static.capabilities import STATIC_CAPABILITIES
from crossdock_eplb_algos.expert_location.static.options import StaticOptions

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.location import Picker, PickerCapabilities, PickerSpec

HOOK_API_VERSION = 1


@hookimpl
def make_expert_location(options: Mapping[str, object], spec: PickerSpec) -> Picker | None:
    """The nearest replica of this rank, or its fair share. Declines where ranks hold the same rows and could pick differently."""
    chosen = read_options(StaticOptions, options, where="[expert_location]")
    has_replicas = spec.maps.logical_to_physical.shape[-1] > 1
    if spec.replicated_rows and spec.sizes.moe_ep_size > 1 and has_replicas:
        return None
    from crossdock_eplb_algos.expert_location.static.picker import StaticPicker

    return StaticPicker(spec, chosen.seed)


@hookimpl
def expert_location_capabilities(
    options: Mapping[str, object], env: Environment
) -> PickerCapabilities | Refusal | None:
    """Picks differ between ranks; a table, so it can be captured."""
    read_options(StaticOptions, options, where="[expert_location]")
    return STATIC_CAPABILITIES
