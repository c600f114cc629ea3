"""Which part of a dimension a rank holds; torch is not imported."""

from __future__ import annotations

import attrs
from crossdock.errors import CheckpointError
from crossdock.types.layout import Owed, SumAxis
from crossdock.types.parallel import ParallelSizes, RankPlace

FP8_BLOCK = 128
"""Rows or columns that share a scale in DeepSeek's fp8 checkpoints."""


@attrs.frozen
class Shard:
    """Half-open range of a dimension."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def range(self) -> slice:
        return slice(self.start, self.stop)

    def times(self, factor: int) -> Shard:
        """The same part counted in finer units, for instance heads in rows."""
        return Shard(self.start * factor, self.stop * factor)


def balanced_shard(size: int, parts: int, index: int) -> Shard:
    """Part ``index`` of ``size`` in ``parts`` nearly equal ranges; any size works, a part may be empty."""
    return Shard(size * index // parts, size * (index + 1) // parts)


def head_shard(num_heads: int, sizes: ParallelSizes, place: RankPlace) -> Shard:
    """Query heads of a rank.

    Raises:
        CheckpointError: the heads cannot be split equally.
    """
    if num_heads % sizes.attn_tp_size:
        raise CheckpointError(
            f"{num_heads} attention heads cannot be split over attn_tp_size {sizes.attn_tp_size}; use a divisor of {num_heads}"
        )
    return balanced_shard(num_heads, sizes.attn_tp_size, place.attn_tp_rank)


def kv_head_shard(num_kv_heads: int, sizes: ParallelSizes, place: RankPlace) -> Shard:
    """Key heads of a rank. With more ranks than heads, neighbouring ranks hold the same one.

    Raises:
        CheckpointError: neither number divides the other.
    """
    width = sizes.attn_tp_size
    if num_kv_heads % width == 0:
        return balanced_shard(num_kv_heads, width, place.attn_tp_rank)
    if width % num_kv_heads == 0:
        head = place.attn_tp_rank * num_kv_heads // width
        return Shard(head, head + 1)
    raise CheckpointError(
        f"{num_kv_heads} key heads and attn_tp_size {width}: one must be a multiple of the other; use a divisor or a multiple of {num_kv_heads}"
    )


def expert_shard(intermediate_size: int, sizes: ParallelSizes, place: RankPlace, *, fp8_block: bool) -> Shard:
    """A rank's part of each routed expert's intermediate size.

    Raises:
        CheckpointError: the size cannot be split, or a split would cut through the blocks that share a scale.
    """
    width = sizes.moe_tp_size
    if intermediate_size % width:
        raise CheckpointError(
            f"moe_intermediate_size {intermediate_size} cannot be split over moe_tp_size {width}; use moe_tp_size 1 and expert parallelism"
        )
    share = intermediate_size // width
    if fp8_block and width > 1 and share % FP8_BLOCK:
        raise CheckpointError(
            f"moe_intermediate_size {intermediate_size} over moe_tp_size {width} gives parts of {share}, which cut through fp8 blocks of "
            f"{FP8_BLOCK}; use moe_tp_size 1 and moe_ep_size {sizes.moe_ep_size * width}, which keeps experts whole"
        )
    return balanced_shard(intermediate_size, width, place.moe_tp_rank)


def summed_shard(size: int, owed: Owed, sizes: ParallelSizes, place: RankPlace) -> Shard:
    """A rank's part of a dimension that is contracted away, when its output owes the sums ``owed``; whole when it owes none."""
    widths = {SumAxis.ATTN_TP: sizes.attn_tp_size, SumAxis.MOE_EP: sizes.moe_ep_size, SumAxis.MOE_TP: sizes.moe_tp_size}
    indices = {
        SumAxis.ATTN_TP: place.attn_tp_rank,
        SumAxis.MOE_EP: place.moe_ep_rank,
        SumAxis.MOE_TP: place.moe_tp_rank,
    }
    parts, index = 1, 0
    for axis in SumAxis:
        if axis in owed:
            parts, index = parts * widths[axis], index * widths[axis] + indices[axis]
    return balanced_shard(size, parts, index)
