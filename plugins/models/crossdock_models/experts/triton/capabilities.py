"""What the ``triton`` experts plugin takes; no torch, so that it can be asked before anything is loaded."""

from __future__ import annotations

from crossdock.types.dispatch import ReceiveLayout
from crossdock.types.experts import ExpertsCapabilities

TRITON_EXPERTS_CAPABILITIES = ExpertsCapabilities(
    layouts=(ReceiveLayout.TOKEN_ROWS, ReceiveLayout.REPLICATED),
    devices=frozenset({"cuda"}),
    weight_dtypes=frozenset({"bfloat16", "fp8_block"}),
    graph_capture=True,
)
