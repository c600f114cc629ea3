"""Extension point ``attention``: attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookspec

if TYPE_CHECKING:
    from crossdock.types.attention import Attention, AttentionCapabilities, AttentionSpec
    from crossdock.types.capability import Environment, Refusal


@hookspec(firstresult=True)
def make_attention(options: Mapping[str, object], spec: AttentionSpec) -> Attention | None:
    """First result. Decides, once at start on every rank, which backend attends over the paged cache.

    Args:
        options: the plugin's own table of the config without ``name``; host data, read with ``read_options``.
        spec: tokens a page, this rank's query heads, what a token stores (``gqa`` or ``mla`` with its sizes), compute dtype (torch.dtype), device.

    Returns:
        A backend without state of a batch: ``plan`` returns it as a value, ``forward`` gets it back. The core owns the cache pools.

    Declining: None when it does not serve this spec; under ``auto`` the next name is tried.

    Raises:
        ConfigValueError: an option is unknown or has a wrong value.

    Source: PagedAttention (vLLM); MLA with absorbed projections (DeepSeek-V2).
    """


@hookspec(firstresult=True)
def attention_capabilities(options: Mapping[str, object], env: Environment) -> AttentionCapabilities | Refusal | None:
    """First result. Decides, before weights are loaded and in the frontend too, which kinds, devices and dtypes it takes.

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
