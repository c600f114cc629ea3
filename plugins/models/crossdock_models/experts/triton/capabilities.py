"""What the ``triton`` experts plugin takes; no torch, so that it can be asked before anything is loaded."""

from __future__ import annotations

from crossdock.types.dispatch import ReceiveLayout, WireDtype
from crossdock.types.experts import ExpertsCapabilities

SCALE_BLOCK = 128
"""Elements of a row that share a scale."""


def triton_capabilities(weight_dtype: str, hidden_size: int, inner_size: int) -> ExpertsCapabilities:
    """Rows by token; fp8 rows only beside fp8 weights whose sizes are whole blocks of scales."""
    is_whole = hidden_size % SCALE_BLOCK == 0 and inner_size % SCALE_BLOCK == 0
    takes_fp8 = weight_dtype == "fp8_block" and is_whole
    return ExpertsCapabilities(
        layouts=(ReceiveLayout.TOKEN_ROWS, ReceiveLayout.REPLICATED),
        devices=frozenset({"cuda"}),
        weight_dtypes=frozenset({"bfloat16", "fp8_block"}),
        wire_dtypes=frozenset({WireDtype.NATIVE, WireDtype.FP8_BLOCK}) if takes_fp8 else frozenset({WireDtype.NATIVE}),
        graph_capture=True,
    )
