"""What ``nvlink`` can do in a parallel layout; no torch, so that it can be asked before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossdock.groups import drop_unit_axes
from crossdock.types.dispatch import DispatcherCapabilities, ReceiveLayout, WireDtype
from crossdock.types.layout import COMPLETE, LOCAL_ROWS

if TYPE_CHECKING:
    from crossdock.types.parallel import ParallelSizes

    from crossdock_dispatchers.nvlink.options import NvlinkOptions


def nvlink_capabilities(sizes: ParallelSizes, options: NvlinkOptions) -> DispatcherCapabilities:
    """Rank-local rows in and out, owing nothing; the expert group must be all ranks, all in one NVLink domain.

    No capacity of its own: buffers are made for the rows that the limits of the configuration allow.
    """
    local_rows = drop_unit_axes(LOCAL_ROWS, sizes)
    return DispatcherCapabilities(
        devices=frozenset({"cuda"}),
        layouts=frozenset({ReceiveLayout.TOKEN_ROWS}),
        input_rows=local_rows,
        output_rows=local_rows,
        output_owed=COMPLETE,
        needs_full_ep=True,
        rank_invariant_picks_needed=False,
        graph_capture=True,
        wire_dtypes=frozenset({WireDtype.FP8_BLOCK if options.wire == "fp8" else WireDtype.NATIVE}),
        split_is_useful=sizes.moe_ep_size > 1,
        max_in_flight=2,
        communication_sms=options.overlap_programs,
        communication_sms_settable=True,
    )
