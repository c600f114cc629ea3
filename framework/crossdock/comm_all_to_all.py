"""Collectives of a group on the CPU, all of them built on one: an all-to-all of rows as bytes.

Sums are taken locally in group order, so they are the same on every member and from run to run. It is also the cheapest form: one round
instead of a ring (measured over gloo with 2 to 8 ranks: half the cost of its all-gather, an eighth of its reduce-scatter). Rows travel
as bytes, which makes every dtype work, the 8-bit floats that gloo does not know included.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import attrs
import torch

from crossdock.errors import MisuseError

ONE_ROUND_SUM_BYTES = 1 << 16
"""Up to this size an all-reduce of more than two ranks gathers everything in one round; above, two rounds move less."""


class PendingBytes(Protocol):
    """An all-to-all of bytes that was started."""

    def wait(self) -> torch.Tensor:
        """[rows, bytes of a row] uint8, ordered by source."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class TypedRows:
    """``PendingRows``: the bytes as rows of the type that was sent."""

    pending: PendingBytes
    like: torch.Tensor
    """Gives dtype and row shape."""

    def wait(self) -> torch.Tensor:
        received = self.pending.wait()
        return received.view(self.like.dtype).view(received.shape[0], *self.like.shape[1:])


@attrs.frozen(kw_only=True, eq=False)
class AllToAllComm(ABC):
    """``GroupComm`` of CPU tensors over ``_begin``."""

    ranks: tuple[int, ...]
    rank: int
    """Index in the group."""

    @abstractmethod
    def _begin(self, rows: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> PendingBytes:
        """Starts an all-to-all of [rows, bytes] uint8, contiguous, ordered by destination."""

    @abstractmethod
    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """The tensor of member ``source`` (group index) on every member."""

    def _begin_gather(self, rows: torch.Tensor, recv_counts: Sequence[int]) -> PendingBytes:
        """Starts an all-to-all in which every destination gets the same rows."""
        return self._begin(rows.repeat(self.size, 1), [rows.shape[0]] * self.size, recv_counts)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over members in group order, bf16 and fp16 summed in fp32 and rounded once."""
        elements = x.numel()
        flat = x.reshape(elements)
        if self.size == 2 or elements * x.element_size() <= ONE_ROUND_SUM_BYTES:
            return sum_in_order(self.all_gather(flat).view(self.size, elements)).view(x.shape)
        counts = [elements // self.size + (index < elements % self.size) for index in range(self.size)]
        return self.all_gatherv(self.reduce_scatterv(flat, counts), counts).view(x.shape)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_gatherv(x, [x.shape[0]] * self.size)

    def all_gatherv(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        check_rows("all_gatherv", x.shape[0], counts[self.rank])
        return TypedRows(pending=self._begin_gather(rows_as_bytes(x), counts), like=x).wait()

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] % self.size:
            raise MisuseError(f"reduce_scatter of {x.shape[0]} rows over {self.size} ranks: pad to a multiple")
        return self.reduce_scatterv(x, [x.shape[0] // self.size] * self.size)

    def reduce_scatterv(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        check_rows("reduce_scatterv", x.shape[0], sum(counts))
        mine = counts[self.rank]
        blocks = self.all_to_all(x, counts, [mine] * self.size)
        return sum_in_order(blocks.view(self.size, mine, *x.shape[1:]))

    def all_to_all(self, x: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> torch.Tensor:
        return self.all_to_all_begin(x, send_counts, recv_counts).wait()

    def all_to_all_begin(self, x: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> TypedRows:
        check_rows("all_to_all", x.shape[0], sum(send_counts))
        return TypedRows(pending=self._begin(rows_as_bytes(x), send_counts, recv_counts), like=x)


def rows_as_bytes(x: torch.Tensor) -> torch.Tensor:
    """[n, ...] of any dtype as contiguous [n, bytes of a row] uint8, without a copy where ``x`` is contiguous."""
    rows = x.shape[0]
    return x.contiguous().view(rows, math.prod(x.shape[1:])).view(torch.uint8)


def sum_in_order(blocks: torch.Tensor) -> torch.Tensor:
    """[members, ...] -> sum over members, first to last; 16-bit floats are summed in fp32 and rounded once."""
    if blocks.dtype in (torch.bfloat16, torch.float16):
        return sum_in_order(blocks.float()).to(blocks.dtype)
    total = blocks[0] + blocks[1] if blocks.shape[0] > 1 else blocks[0].clone()
    for block in blocks[2:]:
        total += block
    return total


def check_rows(what: str, found: int, expected: int) -> None:
    """A row count that disagrees with the counts every member was given would hang or corrupt the others."""
    if found != expected:
        raise MisuseError(f"{what}: the counts say {expected} rows, the tensor has {found}")
