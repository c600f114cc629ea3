"""Extension point ``eplb_algo``: where expert replicas live."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookspec

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, EplbAlgoCapabilities, Refusal
    from crossdock.types.placement import EplbAlgo


@hookspec(firstresult=True)
def make_eplb_algo(options: Mapping[str, object]) -> EplbAlgo | None:
    """First result. Decides, at start or in an offline command, which planner makes placements.

    Args:
        options: the plugin's own table of the config without ``name``; host data, read with ``read_options``.

    Returns:
        A planner. ``plan(load, topology, current)`` works on host arrays (counts [steps, L, E] float64), is deterministic, uses one thread and
        calls no collective; it may run in the background of a serving rank.

    Declining: None when the options rule it out; the start then ends with ``PluginDeclined``.

    Raises:
        ConfigValueError: an option is unknown or has a wrong value.

    Source: DeepSeek's EPLB (hierarchical and global balancing).
    """


@hookspec(firstresult=True)
def eplb_algo_capabilities(options: Mapping[str, object], env: Environment) -> EplbAlgoCapabilities | Refusal | None:
    """First result. Decides, before weights are loaded and in the frontend too, what the planner needs and supports.

    Args:
        options: the plugin's own table of the config without ``name``, as read from TOML; host data. The plugin reads it with
            ``crossdock.options.read_options``, which reports unknown keys and wrong values together.
        env: device name, parallel widths, dtype name, installed packages, model facts; host data, no device behind it.

    Returns:
        The capabilities that the object built from the same options will have, or a refusal with code and sentence.

    Declining: None means that it needs a load and nothing else.

    Raises:
        ConfigValueError: an option is unknown or has a wrong value.

    Cheap: imports neither torch nor an optional package; runs on a machine without the device.
    """
