"""What the ``torch`` attention backend can do; imports no torch."""

from __future__ import annotations

from crossdock.types.attention import AttentionCapabilities

TORCH_ATTENTION_CAPABILITIES = AttentionCapabilities(
    kinds=frozenset({"gqa", "mla"}),
    devices=frozenset({"cpu", "cuda"}),
    dtypes=frozenset({"float32", "bfloat16"}),
    graph_capture=False,
    row_invariant=True,
)
