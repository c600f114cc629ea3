"""Extension point ``experts``: grouped expert computation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookspec

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, Refusal
    from crossdock.types.experts import Experts, ExpertsCapabilities, ExpertsSpec


@hookspec(firstresult=True)
def make_experts(options: Mapping[str, object], spec: ExpertsSpec) -> Experts | None:
    """First result. Decides, once at start on every rank, which code runs the local experts on received rows.

    Args:
        options: the plugin's own table of the config without ``name``; host data, read with ``read_options``.
        spec: hidden size H; this rank's share I of the intermediate size; local slots S; top-k K; activation; compute dtype
            (torch.dtype), device, and the form of the weights (``native`` or ``fp8_block``).

    Returns:
        An experts object without weights. ``attach`` hands it the tensors of a layer by reference ([S, 2I, H] and [S, H, I], on the
        device), which the core owns and may overwrite in place before it calls ``refresh``.

    Declining: None when it does not serve this spec; under ``auto`` the next name is tried.

    Raises:
        ConfigValueError: an option is unknown or has a wrong value.

    Source: DeepGEMM's contiguous and masked grouped GEMMs; SGLang's MoE runners.
    """


@hookspec(firstresult=True)
def experts_capabilities(options: Mapping[str, object], env: Environment) -> ExpertsCapabilities | Refusal | None:
    """First result. Decides, before weights are loaded and in the frontend too, which receive layouts, devices and weight forms it takes.

    Args:
        options: the plugin's own table of the config without ``name``, as read from TOML; host data. The plugin reads it with
            ``crossdock.options.read_options``, which reports unknown keys and wrong values together.
        env: device name, parallel widths, dtype name, installed packages, model facts; host data, no device behind it.

    Returns:
        The capabilities that the object built from the same options will have, or a refusal with code and sentence.

    Declining: None means that it cannot say; it is then left out.

    Raises:
        ConfigValueError: an option is unknown or has a wrong value.

    Cheap: imports neither torch nor an optional package; runs on a machine without the device.
    """
