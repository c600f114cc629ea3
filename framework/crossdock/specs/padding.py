"""Extension point ``padding``: rows of a gathered buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookspec

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, PaddingCapabilities, Refusal
    from crossdock.types.padding import PaddingPolicy


@hookspec(firstresult=True)
def make_padding(options: Mapping[str, object]) -> PaddingPolicy | None:
    """First result. Decides, once at start on every rank, which policy chooses the padding mode of each step.

    Args:
        options: the plugin's own table of the config without ``name``; host data, read with ``read_options``.

    Returns:
        A policy. ``choose(StepCounts)`` gets per-replica row counts (rounded up to attn_tp_size), hidden size, element size in bytes;
        all host integers. It is pure: every rank calls it with equal counts and must get the equal answer.

    Declining: None when the options rule the policy out; the start then ends with ``PluginDeclined``.

    Raises:
        ConfigValueError: an option is unknown or has a wrong value.

    Source: SGLang's DP-attention padding modes, MAX_LEN and SUM_LEN.
    """


@hookspec(firstresult=True)
def padding_capabilities(options: Mapping[str, object], env: Environment) -> PaddingCapabilities | Refusal | None:
    """First result. Decides, before weights are loaded and in the frontend too, which padding modes the policy may choose.

    Args:
        options: the plugin's own table of the config without ``name``, as read from TOML; host data. The plugin reads it with
            ``crossdock.options.read_options``, which reports unknown keys and wrong values together.
        env: device name, parallel widths, dtype name, installed packages, model facts; host data, no device behind it.

    Returns:
        The capabilities that the object built from the same options will have, or a refusal with code and sentence.

    Declining: None means that the policy may choose either mode.

    Raises:
        ConfigValueError: an option is unknown or has a wrong value.

    Cheap: imports neither torch nor an optional package; runs on a machine without the device.
    """
