"""Extension point ``dispatcher``: how tokens travel to experts and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookspec

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.dispatch import Dispatcher, DispatcherCapabilities, DispatcherSpec


@hookspec(firstresult=True)
def make_dispatcher(options: Mapping[str, object], spec: DispatcherSpec) -> Dispatcher | None:
    """First result. Decides, once at start on every rank after the groups exist, which object moves rows between ranks.

    Args:
        options: the plugin's own table of the config without ``name``; host data, read with ``read_options``.
        spec: sizes and this rank's place; the groups' collectives; hidden size H, top-k K, physical experts P; compute dtype
            (torch.dtype) and device; the most rows this rank can bring to a step and the micro-batches in flight (buffers are sized
            by both); the receive layouts that the experts plugin takes, best first.

    Returns:
        A dispatcher whose capabilities equal what ``dispatcher_capabilities`` said. Buffers are allocated here, never in a step.

    Declining: None when it does not serve this spec; the start then ends with ``PluginDeclined``.

    Raises:
        ConfigValueError: an option is unknown or has a wrong value.
        CapacityTooSmall: ``spec.max_rows_per_rank`` is above what it can send; carries the number that is needed.

    Source: DeepEP's two protocols (normal, low latency) and SGLang's token dispatchers, cut into begin and end.
    """


@hookspec(firstresult=True)
def dispatcher_capabilities(options: Mapping[str, object], env: Environment) -> DispatcherCapabilities | Refusal | None:
    """First result. Decides, before weights are loaded and in the frontend too, what the dispatcher can do, and which rows it takes and returns.

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
