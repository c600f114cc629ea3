"""Which rows a rank holds, and which sums a tensor still owes.

A ``Layout`` is the set of axes over which ranks hold *different* rows (DESIGN section 6). Axes of size 1 are dropped by
whoever builds a layout for a concrete parallel layout, so that equality of layouts is equality of what is held.
"""

from __future__ import annotations

import enum
from typing import TypeAlias


class TokenAxis(enum.Enum):
    """An axis of the attention factorisation that can split rows."""

    ATTN_DP = "attn_dp"
    ATTN_CP = "attn_cp"
    ATTN_TP = "attn_tp"


class SumAxis(enum.Enum):
    """A group over which ranks may hold partial sums of the same rows."""

    ATTN_TP = "attn_tp"
    MOE_EP = "moe_ep"
    MOE_TP = "moe_tp"


Layout: TypeAlias = frozenset[TokenAxis]
Owed: TypeAlias = frozenset[SumAxis]

FULL_ROWS: Layout = frozenset()
"""Every rank holds the rows of all replicas."""
ATTN_ROWS: Layout = frozenset({TokenAxis.ATTN_DP, TokenAxis.ATTN_CP})
"""Each replica holds its own rows, every attention-TP rank of it all of them."""
LOCAL_ROWS: Layout = frozenset({TokenAxis.ATTN_DP, TokenAxis.ATTN_CP, TokenAxis.ATTN_TP})
"""Each rank holds its own slice of its replica's rows."""
CP_SHARDS: Layout = frozenset({TokenAxis.ATTN_CP})
"""Rows of all replicas, split over attention CP only."""
COMPLETE: Owed = frozenset()
"""Nothing owed: the tensor is the finished value."""
