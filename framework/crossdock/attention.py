"""Typed entry to the ``attention`` point."""

from __future__ import annotations

from collections.abc import Mapping

from crossdock.plugin_call import build
from crossdock.registry import load_plugin
from crossdock.types.attention import Attention, AttentionSpec


def make_attention(name: str, options: Mapping[str, object], spec: AttentionSpec) -> Attention:
    """The attention plugin ``name`` for ``spec``. The core owns the cache pools; the backend keeps nothing between calls.

    Raises:
        PluginError: it cannot be loaded, declines, or returns an object without the protocol's methods.
        ConfigValueError: an option is wrong.
    """
    attention: Attention = build(load_plugin("attention", name), Attention, options=options, spec=spec)
    return attention
