"""Rows: a tensor that knows which rows it holds and which sums it still owes (DESIGN section 6).

A sum taken twice, or not at all, is the most repeated wrong-output bug of this field, so a tensor that owes a sum is a handle that can
be used once: completing, adding or deferring it spends it. A complete one is an ordinary value.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

import attrs
import torch

from crossdock.errors import RowsMisuse
from crossdock.types.comm import Comms, GroupComm
from crossdock.types.layout import COMPLETE, Layout, Owed, SumAxis, TokenAxis


@attrs.define(eq=False)
class Rows:
    """[rows, ...] of one layout, owing sums over the groups in ``owed``.

    Axes of size 1 are dropped from ``layout`` and ``owed`` at construction, so equal sets mean equal contents.
    """

    _tensor: torch.Tensor
    layout: Layout
    owed: Owed
    comms: Comms
    _spent: str = attrs.field(default="", init=False)

    def __attrs_post_init__(self) -> None:
        if self.layout:
            self.layout = held_layout(self.layout, self.comms)
        if self.owed:
            comms = self.comms
            self.owed = _owed_in(self.owed, comms.attn_tp.size > 1, comms.moe_ep.size > 1, comms.moe_tp.size > 1)

    @property
    def value(self) -> torch.Tensor:
        """The finished tensor.

        Raises:
            RowsMisuse: a sum is owed.
        """
        if self.owed:
            raise RowsMisuse(
                f"rows {list(self._tensor.shape)} were used as complete while they owe a sum over "
                f"{_names(self.owed)}: complete them, or hand them to the next boundary"
            )
        return self._tensor

    @property
    def partial(self) -> torch.Tensor:
        """This rank's addend to look at: shape, dtype, device. Does not spend the handle; whoever settles the sum calls ``take``."""
        return self._tensor

    @property
    def num_rows(self) -> int:
        return int(self._tensor.shape[0])

    def complete(self, axes: Collection[SumAxis] | None = None) -> Rows:
        """Takes the owed sums over ``axes`` (all of them by default); collective over these groups.

        Raises:
            RowsMisuse: a sum over one of the axes is not owed, or this handle was used before.
        """
        wanted = self.owed if axes is None else frozenset(axes)
        wanted = frozenset(axis for axis in wanted if axis_comm(axis, self.comms).size > 1)
        if not wanted <= self.owed:
            raise RowsMisuse(
                f"asked for the sum over {_names(wanted)}, these rows owe {_names(self.owed)}: it was taken before, "
                "or never owed"
            )
        if not wanted:
            return self
        tensor = self._spend("completed")
        for comm in sum_groups(wanted, self.comms):
            tensor = comm.all_reduce(tensor)
        return Rows(tensor, self.layout, self.owed - wanted, self.comms)

    def add(self, other: Rows) -> Rows:
        """Sum of two tensors with the same layout, shape and owed sums; owes the same.

        Raises:
            RowsMisuse: layouts, shapes or owed sums differ, or a handle was used before.
        """
        self._check_same_rows(other._tensor, other.layout)
        if self.owed != other.owed:
            raise RowsMisuse(
                f"cannot add rows that owe {_names(other.owed)} to rows that owe {_names(self.owed)}: complete one "
                "of them, or use add_complete for a finished tensor"
            )
        return Rows(self._spend("added") + other._spend("added"), self.layout, self.owed, self.comms)

    def add_complete(self, x: Rows | torch.Tensor) -> Rows:
        """Adds a finished tensor that every rank holds; it enters on the first rank of the owed groups only.

        Raises:
            RowsMisuse: ``x`` owes a sum, has another layout or shape, or this handle was used before.
        """
        addend = x.value if isinstance(x, Rows) else x
        self._check_same_rows(addend, x.layout if isinstance(x, Rows) else self.layout)
        enters = all(axis_comm(axis, self.comms).rank == 0 for axis in self.owed)
        tensor = self._spend("added")
        return Rows(tensor + addend if enters else tensor, self.layout, self.owed, self.comms)

    def defer(self) -> Rows:
        """Hands the owed sums to the next boundary: this handle is spent, only the returned one can be used.

        Raises:
            RowsMisuse: nothing is owed, or this handle was used before.
        """
        if not self.owed:
            raise RowsMisuse("defer: these rows owe nothing; a finished tensor needs no hand-over")
        return Rows(self._spend("deferred"), self.layout, self.owed, self.comms)

    def take(self) -> torch.Tensor:
        """This rank's addend, for code that settles the sum itself (boundaries, dispatchers); spends the handle.

        Raises:
            RowsMisuse: this handle was used before.
        """
        return self._spend("taken")

    def _spend(self, how: str) -> torch.Tensor:
        """The tensor; marks a handle that owes something as used."""
        if self._spent:
            raise RowsMisuse(
                f"these rows owe a sum over {_names(self.owed)} and were {self._spent} before; used again they would "
                "be summed twice"
            )
        if self.owed:
            self._spent = how
        return self._tensor

    def _check_same_rows(self, tensor: torch.Tensor, layout: Layout) -> None:
        if layout != self.layout or tensor.shape != self._tensor.shape:
            raise RowsMisuse(
                f"cannot add {list(tensor.shape)} in layout {_names(layout)} to {list(self._tensor.shape)} in layout "
                f"{_names(self.layout)}: they are different rows; a boundary must move one of them"
            )


def axis_comm(axis: SumAxis, comms: Comms) -> GroupComm:
    """The group that a sum axis runs over."""
    match axis:
        case SumAxis.ATTN_TP:
            return comms.attn_tp
        case SumAxis.MOE_EP:
            return comms.moe_ep
        case SumAxis.MOE_TP:
            return comms.moe_tp


def sum_groups(owed: Owed, comms: Comms) -> tuple[GroupComm, ...]:
    """Groups whose all-reduces, in this order, settle ``owed``; EP and MoE-TP become one where together they are all ranks."""
    both_moe = {SumAxis.MOE_EP, SumAxis.MOE_TP} <= owed
    if both_moe and comms.moe_ep.size * comms.moe_tp.size == comms.world.size:
        rest = owed - {SumAxis.MOE_EP, SumAxis.MOE_TP}
        return (*sum_groups(rest, comms), comms.world)
    return tuple(axis_comm(axis, comms) for axis in SumAxis if axis in owed)


def held_layout(layout: Layout, comms: Comms) -> Layout:
    """The layout without axes of width 1. attn_cp is 1 wherever collectives run, wider ones are refused at start."""
    tp_size = comms.attn_tp.size
    return _held(layout, comms.world.size > tp_size, tp_size > 1)


@functools.cache
def _held(layout: Layout, has_replicas: bool, has_attn_tp: bool) -> Layout:
    """Kept because every block of every step asks, and hashing enum members is Python code."""
    split = {TokenAxis.ATTN_DP: has_replicas, TokenAxis.ATTN_CP: False, TokenAxis.ATTN_TP: has_attn_tp}
    return frozenset(axis for axis in layout if split[axis])


@functools.cache
def _owed_in(owed: Owed, has_attn_tp: bool, has_moe_ep: bool, has_moe_tp: bool) -> Owed:
    """The sums over groups of more than one rank."""
    split = {SumAxis.ATTN_TP: has_attn_tp, SumAxis.MOE_EP: has_moe_ep, SumAxis.MOE_TP: has_moe_tp}
    return frozenset(axis for axis in owed if split[axis])


def _names(axes: Collection[SumAxis] | Collection[TokenAxis]) -> str:
    return "{" + ", ".join(sorted(axis.value for axis in axes)) + "}"


def complete_rows(tensor: torch.Tensor, layout: Layout, comms: Comms) -> Rows:
    """Rows that owe nothing."""
    return Rows(tensor, layout, COMPLETE, comms)
