"""Entry point of the ``fake`` replica picker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookimpl
from crossdock.options import read_options

from crossdock_eplb_algos.expert_location.fake.capabilities import FAKE_CAPABILITIES
from crossdock_eplb_algos.expert_location.fake.options import FakeOptions

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.location import Picker, PickerCapabilities, PickerSpec

HOOK_API_VERSION = 1


@hookimpl
def make_expert_location(options: Mapping[str, object], spec: PickerSpec) -> Picker | None:
    """Random scores instead of the router's, then all replicas of an expert, evenly."""
    read_options(FakeOptions, options, where="[expert_location]")
    from crossdock_eplb_algos.expert_location.fake.picker import FakePicker

    return FakePicker(spec)


@hookimpl
def expert_location_capabilities(
    options: Mapping[str, object], env: Environment
) -> PickerCapabilities | Refusal | None:
    """The same scores and picks on all ranks wherever they hold the same rows; not capturable."""
    read_options(FakeOptions, options, where="[expert_location]")
    return FAKE_CAPABILITIES
