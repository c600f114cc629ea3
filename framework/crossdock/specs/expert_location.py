"""Extension point ``expert_location``: which replica of an expert takes a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookspec

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.location import Picker, PickerCapabilities, PickerSpec


@hookspec(firstresult=True)
def make_expert_location(options: Mapping[str, object], spec: PickerSpec) -> Picker | None:
    """First result. Decides, once at start on every rank, who turns logical expert ids into physical ones.

    Args:
        options: the plugin's own table of the config without ``name``; host data, read with ``read_options``.
        spec: the placement's maps as device tensors (int64, [L, P], [L, E, X] padded with -1, [L, E]; fixed address, overwritten in place),
            topology, sizes and place, collectives, whether ranks hold the same rows, and a seed.

    Returns:
        A picker. ``pick`` is called in every MoE layer of every step with [n, K] int64 logical ids on the device.

    Declining: None when it does not serve this spec; the start then ends with ``PluginDeclined``.

    Raises:
        ConfigValueError: an option is unknown or has a wrong value.

    Source: SGLang's expert dispatch algorithms (static, dynamic, fake, lp).
    """


@hookspec(firstresult=True)
def expert_location_capabilities(
    options: Mapping[str, object], env: Environment
) -> PickerCapabilities | Refusal | None:
    """First result. Decides, before weights are loaded and in the frontend too, whether all ranks pick alike, whether a collective is needed, whether it can be captured.

    Args:
        options: the plugin's own table of the config without ``name``, as read from TOML; host data. The plugin reads it with
            ``crossdock.options.read_options``, which reports unknown keys and wrong values together.
        env: device name, parallel widths, dtype name, installed packages, model facts; host data, no device behind it.

    Returns:
        The capabilities that the object built from the same options will have, or a refusal with code and sentence.

    Declining: None means that it cannot say; the start then ends with ``PluginDeclined``.

    Raises:
        ConfigValueError: an option is unknown or has a wrong value.

    Cheap: imports neither torch nor an optional package; runs on a machine without the device.
    """
