"""Widths, places and groups of the two factorisations as pure data: testable with no process (the facts, section 1)."""

from __future__ import annotations

import enum
import math

import attrs

from crossdock.errors import ConfigValueError
from crossdock.types.layout import Layout, Owed, SumAxis, TokenAxis
from crossdock.types.parallel import ParallelSizes, RankPlace


class GroupAxis(enum.Enum):
    """The groups of a parallel layout. ``attn_dp`` is data only: its gathers run on ``world``."""

    WORLD = "world"
    ATTN_DP = "attn_dp"
    ATTN_CP = "attn_cp"
    ATTN_TP = "attn_tp"
    MOE_DP = "moe_dp"
    MOE_EP = "moe_ep"
    MOE_TP = "moe_tp"


@attrs.frozen(kw_only=True)
class GroupTable:
    """All groups of one axis: they partition the ranks."""

    axis: GroupAxis
    ranks: tuple[tuple[int, ...], ...]
    """Members of each group in group order."""
    alias: GroupAxis
    """The axis whose communicator serves this one; itself when it needs its own."""


def resolve_sizes(
    *,
    ranks: int,
    attn_dp_size: int = 0,
    attn_cp_size: int = 0,
    attn_tp_size: int = 0,
    moe_dp_size: int = 0,
    moe_ep_size: int = 0,
    moe_tp_size: int = 0,
) -> ParallelSizes:
    """Widths with zeros derived: attn_dp 1, attn_cp 1, attn_tp the rest; moe_dp 1, moe_ep all that is left, moe_tp 1.

    Raises:
        ConfigValueError: a width is negative or the products do not give ``ranks``; every problem is listed.
    """
    given = {
        "attn_dp_size": attn_dp_size,
        "attn_cp_size": attn_cp_size,
        "attn_tp_size": attn_tp_size,
        "moe_dp_size": moe_dp_size,
        "moe_ep_size": moe_ep_size,
        "moe_tp_size": moe_tp_size,
    }
    problems = [f"parallel.{name}: must not be negative, found {value}" for name, value in given.items() if value < 0]
    if ranks < 1:
        problems.append(f"parallel.ranks: must be at least 1, found {ranks}")
    if problems:
        raise ConfigValueError(problems)
    attn_dp, attn_cp, attn_tp = _derive((attn_dp_size or 1, attn_cp_size or 1, attn_tp_size), 2, ranks)
    if moe_ep_size:
        moe_dp, moe_ep, moe_tp = _derive((moe_dp_size or 1, moe_ep_size, moe_tp_size), 2, ranks)
    else:
        moe_dp, moe_ep, moe_tp = _derive((moe_dp_size or 1, 0, moe_tp_size or 1), 1, ranks)
    sizes = ParallelSizes(
        ranks=ranks,
        attn_dp_size=attn_dp,
        attn_cp_size=attn_cp,
        attn_tp_size=attn_tp,
        moe_dp_size=moe_dp,
        moe_ep_size=moe_ep,
        moe_tp_size=moe_tp,
    )
    check_sizes(sizes)
    return sizes


def _derive(widths: tuple[int, int, int], index: int, ranks: int) -> tuple[int, int, int]:
    """Fills a zero at ``index`` with what the other two leave, at least 1; ``check_sizes`` judges the product."""
    if widths[index]:
        return widths
    others = math.prod(width for position, width in enumerate(widths) if position != index)
    filled = list(widths)
    filled[index] = max(ranks // others, 1)
    return filled[0], filled[1], filled[2]


def check_sizes(sizes: ParallelSizes) -> None:
    """Accepts widths whose two factorisations cover the same ranks.

    Raises:
        ConfigValueError: lists each rule that does not hold, with the numbers.
    """
    problems: list[str] = []
    attention = sizes.attn_dp_size * sizes.attn_cp_size * sizes.attn_tp_size
    if attention != sizes.ranks:
        problems.append(
            f"parallel: attn_dp_size {sizes.attn_dp_size} * attn_cp_size {sizes.attn_cp_size} * attn_tp_size "
            f"{sizes.attn_tp_size} is {attention}, must be ranks = {sizes.ranks}"
        )
    experts = sizes.moe_dp_size * sizes.moe_ep_size * sizes.moe_tp_size
    if experts != sizes.ranks:
        problems.append(
            f"parallel: moe_dp_size {sizes.moe_dp_size} * moe_ep_size {sizes.moe_ep_size} * moe_tp_size "
            f"{sizes.moe_tp_size} is {experts}, must be ranks = {sizes.ranks}"
        )
    if sizes.moe_dp_size > 1 and sizes.moe_ep_size > 1 and sizes.moe_tp_size > 1:
        problems.append(
            f"parallel.moe_tp_size: must be 1 when moe_dp_size {sizes.moe_dp_size} and moe_ep_size "
            f"{sizes.moe_ep_size} are both above 1, found {sizes.moe_tp_size}"
        )
    if sizes.moe_dp_size > 1 and sizes.attn_cp_size != sizes.moe_dp_size:
        problems.append(
            f"parallel.attn_cp_size: must equal moe_dp_size {sizes.moe_dp_size} when that is above 1, "
            f"found {sizes.attn_cp_size}"
        )
    if problems:
        raise ConfigValueError(problems)


def rank_place(sizes: ParallelSizes, rank: int) -> RankPlace:
    """Indices of a rank in both factorisations, last factor fastest.

    Raises:
        ValueError: ``rank`` is not one of the layout's.
    """
    if not 0 <= rank < sizes.ranks:
        raise ValueError(f"rank {rank} is outside the layout's {sizes.ranks} ranks")
    attn_block = sizes.attn_cp_size * sizes.attn_tp_size
    moe_block = sizes.moe_ep_size * sizes.moe_tp_size
    return RankPlace(
        rank=rank,
        attn_dp_rank=rank // attn_block,
        attn_cp_rank=rank // sizes.attn_tp_size % sizes.attn_cp_size,
        attn_tp_rank=rank % sizes.attn_tp_size,
        moe_dp_rank=rank // moe_block,
        moe_ep_rank=rank % moe_block // sizes.moe_tp_size,
        moe_tp_rank=rank % sizes.moe_tp_size,
    )


def leader_rank(sizes: ParallelSizes, attn_dp_rank: int) -> int:
    """The rank that schedules a replica: its first."""
    return attn_dp_rank * sizes.attn_cp_size * sizes.attn_tp_size


def leader_ranks(sizes: ParallelSizes) -> tuple[int, ...]:
    """Leaders of all replicas, in replica order."""
    return tuple(leader_rank(sizes, replica) for replica in range(sizes.attn_dp_size))


def group_ranks(sizes: ParallelSizes, axis: GroupAxis) -> tuple[tuple[int, ...], ...]:
    """The groups of an axis, ordered by their first rank. ``moe_dp`` is ``attn_cp`` when attn_cp is wider."""
    every = range(sizes.ranks)
    attn_tp, attn_cp = sizes.attn_tp_size, sizes.attn_cp_size
    moe_block = sizes.moe_ep_size * sizes.moe_tp_size
    match axis:
        case GroupAxis.WORLD:
            return (tuple(every),)
        case GroupAxis.ATTN_TP:
            return _strided(sizes.ranks, width=attn_tp, stride=1)
        case GroupAxis.ATTN_CP:
            return _strided(sizes.ranks, width=attn_cp, stride=attn_tp)
        case GroupAxis.ATTN_DP:
            return _strided(sizes.ranks, width=sizes.attn_dp_size, stride=attn_cp * attn_tp)
        case GroupAxis.MOE_TP:
            return _strided(sizes.ranks, width=sizes.moe_tp_size, stride=1)
        case GroupAxis.MOE_EP:
            return _strided(sizes.ranks, width=sizes.moe_ep_size, stride=sizes.moe_tp_size)
        case GroupAxis.MOE_DP:
            if attn_cp > sizes.moe_dp_size:
                return group_ranks(sizes, GroupAxis.ATTN_CP)
            return _strided(sizes.ranks, width=sizes.moe_dp_size, stride=moe_block)


def _strided(ranks: int, *, width: int, stride: int) -> tuple[tuple[int, ...], ...]:
    """Groups of ``width`` ranks, ``stride`` apart, tiling blocks of ``width * stride``."""
    block = width * stride
    return tuple(
        tuple(range(start + offset, start + offset + block, stride))
        for start in range(0, ranks, block)
        for offset in range(stride)
    )


def group_alias(sizes: ParallelSizes, axis: GroupAxis) -> GroupAxis:
    """The axis whose communicator an axis uses: the first in the order of ``GroupAxis`` with the same groups.

    ``attn_dp`` has no communicator of its own, so it is nobody's alias.
    """
    mine = group_ranks(sizes, axis)
    for other in GroupAxis:
        if other is axis:
            break
        if other is not GroupAxis.ATTN_DP and group_ranks(sizes, other) == mine:
            return other
    return axis


def group_tables(sizes: ParallelSizes) -> tuple[GroupTable, ...]:
    """Every axis with its groups and its alias, for creation and for the receipt."""
    return tuple(
        GroupTable(axis=axis, ranks=group_ranks(sizes, axis), alias=group_alias(sizes, axis)) for axis in GroupAxis
    )


def drop_unit_axes(layout: Layout, sizes: ParallelSizes) -> Layout:
    """The layout without axes of width 1, so that equal layouts hold equal rows."""
    widths = {
        TokenAxis.ATTN_DP: sizes.attn_dp_size,
        TokenAxis.ATTN_CP: sizes.attn_cp_size,
        TokenAxis.ATTN_TP: sizes.attn_tp_size,
    }
    return frozenset(axis for axis in layout if widths[axis] > 1)


def drop_unit_sums(owed: Owed, sizes: ParallelSizes) -> Owed:
    """Owed sums without groups of one rank, whose sum is the tensor itself."""
    widths = {
        SumAxis.ATTN_TP: sizes.attn_tp_size,
        SumAxis.MOE_EP: sizes.moe_ep_size,
        SumAxis.MOE_TP: sizes.moe_tp_size,
    }
    return frozenset(axis for axis in owed if widths[axis] > 1)


def align_rows(rows: int, multiple: int) -> int:
    """``rows`` rounded up to a multiple, so that every attention-TP rank gets an equal slice."""
    return -(-rows // multiple) * multiple
