"""How many rows a low-latency step must take, and whether the library can: pure numbers, so that a start is refused before anything is built."""

from __future__ import annotations

import math

from crossdock.errors import CapacityTooSmall
from crossdock.types.capability import Refusal

from crossdock_dispatchers.deepep.options import DeepEpOptions

MAX_LOW_LATENCY_ROWS = 1024
"""The library tags messages with the row number; SGLang keeps to the same limit."""
MIN_QUEUE_DEPTH = 1024


def needed_low_latency_rows(options: DeepEpOptions, max_rows: int, max_decode_rows: int) -> int:
    """Most rows that a rank can bring to a low-latency step; 0 when unknown, or when there are no such steps."""
    if options.mode == "normal":
        return 0
    return max_rows if options.mode == "low_latency" else max_decode_rows or max_rows


def capacity_refusal(options: DeepEpOptions, needed: int) -> Refusal | None:
    """Why a low-latency step of ``needed`` rows a rank cannot be sent."""
    limit = options.low_latency_rows or MAX_LOW_LATENCY_ROWS
    if max(needed, options.low_latency_rows) <= MAX_LOW_LATENCY_ROWS and needed <= limit:
        return None
    if options.low_latency_rows > MAX_LOW_LATENCY_ROWS:
        sentence = (
            f"dispatcher deepep: low_latency_rows = {options.low_latency_rows} is above the library's limit of {MAX_LOW_LATENCY_ROWS}; "
            "lower it, or set dispatcher.mode = 'normal'"
        )
        return Refusal(code="capacity_too_small", sentence=sentence, needed=options.low_latency_rows)
    limits = "scheduler.max_step_tokens" if options.mode == "low_latency" else "scheduler.max_running_requests"
    remedy = f"raise dispatcher.low_latency_rows to {needed}, or " if needed <= MAX_LOW_LATENCY_ROWS else ""
    sentence = (
        f"dispatcher deepep sends at most {limit} rows a rank in a low-latency step and the limits allow {needed}; {remedy}"
        f"lower {limits}, or set dispatcher.mode = 'normal'"
    )
    return Refusal(code="capacity_too_small", sentence=sentence, needed=needed)


def low_latency_capacity(options: DeepEpOptions, needed: int) -> int:
    """Rows that the low-latency buffers are made for.

    Raises:
        CapacityTooSmall: ``needed`` rows cannot be sent; carries the number.
    """
    refusal = capacity_refusal(options, needed)
    if refusal is not None:
        raise CapacityTooSmall(refusal.sentence, needed=refusal.needed or needed)
    return options.low_latency_rows or needed


def aligned_capacity(rows: int, ranks: int, alignment: int) -> int:
    """At least ``rows``, so that an expert's places, this many of every rank, are a multiple of the experts' alignment."""
    step = alignment // math.gcd(alignment, ranks)
    return -(-rows // step) * step


def queue_depth(capacity: int, current: int) -> int:
    """Work requests that NVSHMEM must hold: two for each row, and never fewer than is set already."""
    return max(current, MIN_QUEUE_DEPTH, 2 * (capacity + 1))
