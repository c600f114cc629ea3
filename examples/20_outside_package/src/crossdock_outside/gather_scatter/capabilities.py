"""What ``gather_scatter`` can do; imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossdock.groups import drop_unit_axes
from crossdock.types.dispatch import DispatcherCapabilities, ReceiveLayout
from crossdock.types.layout import COMPLETE, LOCAL_ROWS

if TYPE_CHECKING:
    from crossdock.types.parallel import ParallelSizes


def gather_scatter_capabilities(sizes: ParallelSizes) -> DispatcherCapabilities:
    """Each rank's own rows in and out, complete."""
    own_rows = drop_unit_axes(LOCAL_ROWS, sizes)
    return DispatcherCapabilities(
        devices=frozenset({"cpu", "cuda"}),
        layouts=frozenset({ReceiveLayout.REPLICATED}),
        input_rows=own_rows,
        output_rows=own_rows,
        output_owed=COMPLETE,
        needs_full_ep=True,
        # Each row's replicas are picked by the rank that owns it, and travel with the row.
        rank_invariant_picks_needed=False,
    )
