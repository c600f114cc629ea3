"""What ``gather_scatter`` can do; imports no torch."""

from __future__ import annotations

from crossdock.types.dispatch import DispatcherCapabilities, ReceiveLayout
from crossdock.types.layout import COMPLETE, LOCAL_ROWS

GATHER_SCATTER_CAPABILITIES = DispatcherCapabilities(
    devices=frozenset({"cpu", "cuda"}),
    layouts=frozenset({ReceiveLayout.REPLICATED}),
    input_rows=LOCAL_ROWS,
    output_rows=LOCAL_ROWS,
    output_owed=COMPLETE,
    needs_full_ep=True,
    # Each row's replicas are picked by the rank that owns it, and travel with the row.
    rank_invariant_picks_needed=False,
)
