"""Extension point ``strategy``: the order of a layer's ops and what overlaps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookspec

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.strategy import Strategy, StrategyCapabilities


@hookspec(firstresult=True)
def make_strategy(options: Mapping[str, object]) -> Strategy | None:
    """First result. Decides, once at start on every rank, how the ops of one or more micro-batches are ordered and interleaved.

    Args:
        options: the plugin's own table of the config without ``name``; host data, read with ``read_options``.

    Returns:
        A strategy. ``plan(ops, mode)`` is called when the executor is built, once a layer kind and forward mode; it is pure and every rank
        must get the same stages, because the stages order the collectives.

    Declining: None when the options rule it out; the start then ends with ``PluginDeclined``.

    Raises:
        ConfigValueError: an option is unknown or has a wrong value.

    Source: DeepSeek's two-batch overlap; SGLang's operation strategies.
    """


@hookspec(firstresult=True)
def strategy_capabilities(options: Mapping[str, object], env: Environment) -> StrategyCapabilities | Refusal | None:
    """First result. Decides, before weights are loaded and in the frontend too, how many micro-batches are in flight, on which devices.

    Args:
        options: the plugin's own table of the config without ``name``, as read from TOML; host data. The plugin reads it with
            ``crossdock.options.read_options``, which reports unknown keys and wrong values together.
        env: device name, parallel widths, dtype name, installed packages, model facts; host data, no device behind it.

    Returns:
        The capabilities that the object built from the same options will have, or a refusal with code and sentence.

    Declining: None means one micro-batch, any device.

    Raises:
        ConfigValueError: an option is unknown or has a wrong value.

    Cheap: imports neither torch nor an optional package; runs on a machine without the device.
    """
