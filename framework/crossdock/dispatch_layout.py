"""How many rows each rank brings to a dispatch, as pure numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossdock.groups import drop_unit_axes
from crossdock.types.dispatch import DispatchStep
from crossdock.types.layout import Layout, TokenAxis

if TYPE_CHECKING:
    from crossdock.types.parallel import ParallelSizes
    from crossdock.types.step import StepPlan


def rows_of_rank(layout: Layout, padded_tokens: tuple[int, ...], rank: int, sizes: ParallelSizes) -> int:
    """Rows that ``rank`` holds in ``layout`` when replica d has ``padded_tokens[d]`` rows, a multiple of attn_tp_size."""
    layout = drop_unit_axes(layout, sizes)
    if TokenAxis.ATTN_DP in layout:
        rows = padded_tokens[rank // (sizes.attn_cp_size * sizes.attn_tp_size)]
    else:
        rows = sum(padded_tokens)
    return rows // sizes.attn_tp_size if TokenAxis.ATTN_TP in layout else rows


def dispatch_step(plan: StepPlan, input_rows: Layout, sizes: ParallelSizes, *, epoch: int = 0) -> DispatchStep:
    """The integers that a dispatcher reads in a step, from the global plan; the same on all ranks."""
    counts = tuple(rows_of_rank(input_rows, plan.padded_tokens, rank, sizes) for rank in range(sizes.ranks))
    return DispatchStep(
        mode=plan.dispatch_mode,
        bucket=None if plan.bucket is None else max(counts),
        epoch=epoch,
        micro_batches=2 if plan.overlap else 1,
        source_counts=counts,
    )
