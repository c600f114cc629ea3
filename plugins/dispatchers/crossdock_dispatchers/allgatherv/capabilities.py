"""What ``allgatherv`` can do in a parallel layout; no torch, so that it can be asked before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossdock.groups import drop_unit_sums
from crossdock.types.dispatch import DispatcherCapabilities, ReceiveLayout
from crossdock.types.layout import FULL_ROWS, SumAxis

if TYPE_CHECKING:
    from crossdock.types.parallel import ParallelSizes


def allgatherv_capabilities(sizes: ParallelSizes) -> DispatcherCapabilities:
    """Full rows in, full rows out, owing the sum over all ranks that hold a part of the experts."""
    return DispatcherCapabilities(
        devices=frozenset({"cpu", "cuda"}),
        layouts=frozenset({ReceiveLayout.REPLICATED}),
        input_rows=FULL_ROWS,
        output_rows=FULL_ROWS,
        output_owed=drop_unit_sums(frozenset({SumAxis.MOE_EP, SumAxis.MOE_TP}), sizes),
        needs_full_ep=False,
        rank_invariant_picks_needed=sizes.moe_ep_size > 1,
        graph_capture=True,
        max_in_flight=8,
    )
