"""Widths of the two factorisations of the same ranks, and one rank's place in them (the facts, section 1)."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class ParallelSizes:
    """Resolved widths. ``attn_dp * attn_cp * attn_tp == moe_dp * moe_ep * moe_tp == ranks``, last factor fastest."""

    ranks: int
    attn_dp_size: int
    attn_cp_size: int
    attn_tp_size: int
    moe_dp_size: int
    moe_ep_size: int
    moe_tp_size: int


@attrs.frozen(kw_only=True)
class RankPlace:
    """Indices of one rank in both factorisations."""

    rank: int
    attn_dp_rank: int
    attn_cp_rank: int
    attn_tp_rank: int
    moe_dp_rank: int
    moe_ep_rank: int
    moe_tp_rank: int
