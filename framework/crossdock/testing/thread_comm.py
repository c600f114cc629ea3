"""Collectives between threads of one process: the reference the real ones are compared with, and the base of property tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TypeAlias

import attrs
import torch

from crossdock.comm import COMM_AXES, LocalPendingRows, RankComms
from crossdock.groups import GroupAxis, group_ranks
from crossdock.types.comm import GroupComm
from crossdock.types.parallel import ParallelSizes

Desk: TypeAlias = dict[int, tuple[str, torch.Tensor]]
"""What each member of a group brings to a collective: its name and a tensor."""


@attrs.define(eq=False)
class ThreadRendezvous:
    """Meeting points of all groups of one world."""

    timeout_s: float
    _barriers: dict[tuple[int, ...], threading.Barrier] = attrs.field(
        factory=dict[tuple[int, ...], threading.Barrier], init=False
    )
    _desks: dict[tuple[int, ...], Desk] = attrs.field(factory=dict[tuple[int, ...], Desk], init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _is_aborted: bool = attrs.field(default=False, init=False)

    def swap(self, members: tuple[int, ...], rank: int, what: str, x: torch.Tensor) -> list[torch.Tensor]:
        """Every member's tensor in group order; all members must be in the same collective."""
        with self._lock:
            if self._is_aborted:
                raise threading.BrokenBarrierError
            barrier = self._barriers.setdefault(members, threading.Barrier(len(members)))
            desk = self._desks.setdefault(members, {})
        desk[rank] = (what, x.clone())
        barrier.wait(self.timeout_s)
        entries = [desk[member] for member in range(len(members))]
        barrier.wait(self.timeout_s)
        others = {entry[0] for entry in entries}
        if len(others) > 1:
            raise AssertionError(f"ranks {members} met in different collectives: {sorted(others)}")
        return [entry[1] for entry in entries]

    def abort(self) -> None:
        """Lets every waiting rank fail: one of them is gone."""
        with self._lock:
            self._is_aborted = True
            for barrier in self._barriers.values():
                barrier.abort()


@attrs.frozen(kw_only=True, eq=False)
class ThreadComm:
    """``GroupComm`` of one thread; each method is its own definition, over the tensors of all members."""

    ranks: tuple[int, ...]
    rank: int
    rendezvous: ThreadRendezvous

    @property
    def size(self) -> int:
        return len(self.ranks)

    def _swap(self, what: str, x: torch.Tensor) -> list[torch.Tensor]:
        return self.rendezvous.swap(self.ranks, self.rank, what, x)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return x
        return torch.stack(self._swap("all_reduce", x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return x
        parts = self._swap("all_gather", x)
        assert all(part.shape == x.shape for part in parts), "all_gather needs equal blocks"
        return torch.cat(parts)

    def all_gatherv(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        if self.size == 1:
            return x
        parts = self._swap(f"all_gatherv {list(counts)}", x)
        assert [part.shape[0] for part in parts] == list(counts), "rows differ from the counts"
        return torch.cat(parts)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return x
        assert x.shape[0] % self.size == 0, "reduce_scatter needs equal blocks"
        return self._block("reduce_scatter", x, [x.shape[0] // self.size] * self.size)

    def reduce_scatterv(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        if self.size == 1:
            return x
        assert x.shape[0] == sum(counts), "rows differ from the counts"
        return self._block(f"reduce_scatterv {list(counts)}", x, counts)

    def _block(self, what: str, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        total = torch.stack(self._swap(what, x)).sum(0)
        start = sum(counts[: self.rank])
        return total[start : start + counts[self.rank]]

    def all_to_all(self, x: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> torch.Tensor:
        if self.size == 1:
            return x
        offsets = torch.tensor([0, *send_counts]).cumsum(0)
        parts = self._swap("all_to_all", x)
        tables = self._swap("all_to_all offsets", offsets)
        received = [
            part[int(table[self.rank]) : int(table[self.rank + 1])] for part, table in zip(parts, tables, strict=True)
        ]
        assert [part.shape[0] for part in received] == list(recv_counts), "sent and expected rows differ"
        return torch.cat(received)

    def all_to_all_begin(
        self, x: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> LocalPendingRows:
        return LocalPendingRows(self.all_to_all(x, send_counts, recv_counts))

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        if self.size == 1:
            return x
        return self._swap(f"broadcast {source}", x)[source].clone()


def thread_comms(sizes: ParallelSizes, rank: int, rendezvous: ThreadRendezvous) -> RankComms:
    """The groups of one rank of a world of threads."""
    groups: dict[GroupAxis, GroupComm] = {}
    for axis in COMM_AXES:
        members = next(members for members in group_ranks(sizes, axis) if rank in members)
        groups[axis] = ThreadComm(ranks=members, rank=members.index(rank), rendezvous=rendezvous)
    return RankComms(
        world=groups[GroupAxis.WORLD],
        attn_tp=groups[GroupAxis.ATTN_TP],
        moe_ep=groups[GroupAxis.MOE_EP],
        moe_tp=groups[GroupAxis.MOE_TP],
    )
