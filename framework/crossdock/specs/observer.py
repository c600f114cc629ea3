"""Extension point ``observer``: who is told of steps, loads, rebalances and faults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookspec

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, ObserverCapabilities, Refusal
    from crossdock.types.observer import Observer, ObserverSpec


@hookspec(firstresult=True)
def make_observer(options: Mapping[str, object], spec: ObserverSpec) -> Observer | None:
    """First result, of one plugin; every observer that the config names is built. Decides, at start, who is told what happened.

    The point collects: all named observers get every event, must not depend on their order, and cannot change a step.

    Args:
        options: the table ``[observer.<name>]`` of the config; host data, read with ``read_options``.
        spec: rank, replica, number of ranks, and the folder for files.

    Returns:
        An observer; its methods are called on the host between steps with plain values, never with tensors.

    Declining: None when there is nothing to observe on this rank; it is then left out.

    Raises:
        ConfigValueError: an option is unknown or has a wrong value.

    Source: pluggy's collecting hooks; metrics names follow vLLM's and SGLang's.
    """


@hookspec(firstresult=True)
def observer_capabilities(options: Mapping[str, object], env: Environment) -> ObserverCapabilities | Refusal | None:
    """First result. Decides, before weights are loaded and in the frontend too, which events the observer wants.

    Args:
        options: the plugin's own table of the config without ``name``, as read from TOML; host data. The plugin reads it with
            ``crossdock.options.read_options``, which reports unknown keys and wrong values together.
        env: device name, parallel widths, dtype name, installed packages, model facts; host data, no device behind it.

    Returns:
        The capabilities that the object built from the same options will have, or a refusal with code and sentence.

    Declining: None means all events.

    Raises:
        ConfigValueError: an option is unknown or has a wrong value.

    Cheap: imports neither torch nor an optional package; runs on a machine without the device.
    """
