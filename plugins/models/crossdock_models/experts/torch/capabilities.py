"""What the ``torch`` experts plugin takes; no torch, so that it can be asked before anything is loaded."""

from __future__ import annotations

from crossdock.types.dispatch import ReceiveLayout
from crossdock.types.experts import ExpertsCapabilities


def torch_experts_capabilities(form: str) -> ExpertsCapabilities:
    """``auto`` takes the form that is asked for; a named form rounds as it does."""
    return ExpertsCapabilities(
        layouts=(ReceiveLayout.TOKEN_ROWS, ReceiveLayout.REPLICATED, ReceiveLayout.FLAT),
        devices=frozenset({"cpu", "cuda"}),
        weight_dtypes=frozenset({"float32", "bfloat16", "fp8_block"}),
        row_invariant=form == "auto",
    )
