"""What ``alltoallv`` can do in a parallel layout; no torch, so that it can be asked before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossdock.groups import drop_unit_axes
from crossdock.types.dispatch import DispatcherCapabilities, ReceiveLayout
from crossdock.types.layout import COMPLETE, LOCAL_ROWS

if TYPE_CHECKING:
    from crossdock.types.parallel import ParallelSizes


def alltoallv_capabilities(sizes: ParallelSizes) -> DispatcherCapabilities:
    """Rank-local rows in and out, owing nothing; the expert group must be all ranks."""
    local_rows = drop_unit_axes(LOCAL_ROWS, sizes)
    return DispatcherCapabilities(
        devices=frozenset({"cpu", "cuda"}),
        layouts=frozenset({ReceiveLayout.TOKEN_ROWS}),
        input_rows=local_rows,
        output_rows=local_rows,
        output_owed=COMPLETE,
        needs_full_ep=True,
        rank_invariant_picks_needed=False,
        split_is_useful=sizes.moe_ep_size > 1,
        max_in_flight=8,
    )
