"""What the ``triton`` attention backend can do; imports no torch."""

from __future__ import annotations

from crossdock.types.attention import AttentionCapabilities

TRITON_ATTENTION_CAPABILITIES = AttentionCapabilities(
    kinds=frozenset({"gqa", "mla"}),
    devices=frozenset({"cuda"}),
    dtypes=frozenset({"float32", "bfloat16"}),
    graph_capture=True,
    prefill_capture=True,
)
