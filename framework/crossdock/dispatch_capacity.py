"""How many rows a rank can bring to one dispatch, from the limits of the configuration: pure numbers, checked at start.

Rows beyond a dispatcher's capacity never vanish: a start whose limits do not fit is refused with the number that is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from crossdock.dispatch_layout import rows_of_rank
from crossdock.errors import CapacityTooSmall
from crossdock.groups import align_rows

if TYPE_CHECKING:
    from crossdock.types.dispatch import DispatcherCapabilities
    from crossdock.types.layout import Layout
    from crossdock.types.parallel import ParallelSizes


@attrs.frozen(kw_only=True)
class RowLimits:
    """Limits of one replica that bound a step's rows."""

    max_step_tokens: int
    """Most tokens of one step, prefill chunks included."""
    max_running_requests: int
    """Most decode rows of one step."""
    largest_bucket: int = 0
    """Largest captured graph size; idle replicas are padded up to it."""
    warmup_tokens: int = 0
    """Rows of a warm-up step, where it is not bound by ``max_step_tokens``."""


def needed_rows_per_rank(limits: RowLimits, input_rows: Layout, sizes: ParallelSizes, *, prefills: bool = True) -> int:
    """Most rows that one rank can bring to one call of a dispatcher.

    ``prefills`` False: for a protocol that takes decode steps only (low latency). Padding may raise every replica to the largest
    count, so full rows are bounded by replicas x the largest padded count. A child of an overlapped step is never larger than the
    step, padding to attn_tp_size included, because a child gets at most all rows but one.
    """
    tokens = max(limits.max_running_requests, limits.largest_bucket, limits.warmup_tokens)
    if prefills:
        tokens = max(tokens, limits.max_step_tokens)
    padded = align_rows(tokens, sizes.attn_tp_size)
    return rows_of_rank(input_rows, (padded,) * sizes.attn_dp_size, 0, sizes)


def check_capacity(name: str, capabilities: DispatcherCapabilities, needed: int) -> None:
    """Raises ``CapacityTooSmall`` when ``needed`` rows a rank are more than the dispatcher can send."""
    capacity = capabilities.capacity_rows_per_rank
    if capacity is not None and needed > capacity:
        raise CapacityTooSmall(
            f"dispatcher {name!r} takes at most {capacity} rows a rank and the limits allow {needed}; raise its capacity to "
            f"{needed}, or lower scheduler.max_step_tokens and scheduler.max_running_requests",
            needed=needed,
        )
