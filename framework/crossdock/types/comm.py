"""Collectives as the boundary and the dispatchers see them; one object a group, in torch or in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class PendingRows(Protocol):
    """A collective that was started; what it returns is valid after ``wait`` only."""

    def wait(self) -> torch.Tensor:
        """Finishes the collective. Called once."""
        ...


class GroupComm(Protocol):
    """Collectives of one group. Every member calls the same method in the same order, with zero rows too.

    Row dimension is 0 everywhere; the other dimensions and the dtype are equal on all members. Inputs are not changed.
    A group of size 1 returns its input without a copy.
    """

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the members, in group order."""
        ...

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int:
        """This process's index in the group."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over members, same shape."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...] of each member, equal n -> [size * n, ...] in group order."""
        ...

    def all_gatherv(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """[counts[rank], ...] -> [sum(counts), ...] in group order."""
        ...

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """[size * n, ...] -> own block [n, ...] of the sum."""
        ...

    def reduce_scatterv(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """[sum(counts), ...] -> own block [counts[rank], ...] of the sum."""
        ...

    def all_to_all(self, x: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> torch.Tensor:
        """Rows ordered by destination -> rows ordered by source, ``sum(recv_counts)`` of them."""
        ...

    def all_to_all_begin(self, x: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> PendingRows:
        """``all_to_all`` without waiting, so that work between begin and ``wait`` hides it. ``x`` must not change before ``wait``."""
        ...

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """The tensor of member ``source`` (group index) on every member."""
        ...


class Comms(Protocol):
    """The groups a rank belongs to. ``world`` holds all ranks of the job's parallel layout."""

    @property
    def world(self) -> GroupComm: ...
    @property
    def attn_tp(self) -> GroupComm: ...
    @property
    def moe_ep(self) -> GroupComm: ...
    @property
    def moe_tp(self) -> GroupComm: ...
