"""Collectives of one group over gloo, all of them built on one all-to-all.

Sums are taken locally in group order, so they are the same on every member and from run to run. It is also the cheapest form:
one round instead of a ring (measured with 2 to 8 ranks: half the cost of gloo's all-gather, an eighth of its reduce-scatter).
Rows travel as bytes, which makes every dtype work, the 8-bit floats that gloo does not know included.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from crossdock.errors import MisuseError, RankLost

c10d: Any = dist
"""torch.distributed declares no argument types."""
ONE_ROUND_SUM_BYTES = 1 << 16
"""Up to this size an all-reduce of more than two ranks gathers everything in one round; above, two rounds move less."""


@attrs.frozen(kw_only=True, eq=False)
class GlooComm:
    """``GroupComm`` over a gloo process group; tensors on the CPU."""

    group: ProcessGroup
    ranks: tuple[int, ...]
    rank: int
    """Index in the group."""

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
        rows = x.shape[0]
        repeated = x.unsqueeze(0).expand(self.size, *x.shape).reshape(self.size * rows, *x.shape[1:])
        return self.all_to_all(repeated, [rows] * self.size, counts)

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

    def all_to_all_begin(
        self, x: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> GlooPendingRows:
        check_rows("all_to_all", x.shape[0], sum(send_counts))
        sent = rows_as_bytes(x)
        received = torch.empty((sum(recv_counts), sent.shape[1]), dtype=torch.uint8)
        with self.named_failure("all_to_all"):
            work = c10d.all_to_all_single(
                received, sent, list(recv_counts), list(send_counts), group=self.group, async_op=True
            )
        return GlooPendingRows(comm=self, work=work, sent=sent, received=received, like=x)

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        buffer = rows_as_bytes(x.reshape(1, -1) if x.dim() == 0 else x)
        if self.rank != source:
            buffer = torch.empty_like(buffer)
        with self.named_failure("broadcast"):
            c10d.broadcast(buffer, self.ranks[source], group=self.group)
        return x if self.rank == source else buffer.view(x.dtype).view(x.shape)

    @contextlib.contextmanager
    def named_failure(self, what: str) -> Generator[None, None, None]:
        """gloo's errors name addresses; ours say which ranks were at it."""
        try:
            yield
        except RuntimeError as error:
            members = ", ".join(str(rank) for rank in self.ranks)
            raise RankLost(
                f"rank {self.ranks[self.rank]}: {what} over ranks {members} failed, a peer has ended or stopped "
                f"(gloo: {str(error).splitlines()[0]}); see the other ranks' logs"
            ) from error


@attrs.frozen(kw_only=True, eq=False)
class GlooPendingRows:
    """An all-to-all in flight; keeps its buffers alive."""

    comm: GlooComm
    work: dist.Work
    sent: torch.Tensor
    received: torch.Tensor
    like: torch.Tensor
    """Gives dtype and row shape."""

    def wait(self) -> torch.Tensor:
        with self.comm.named_failure("all_to_all"):
            self.work.wait()
        return self.received.view(self.like.dtype).view(self.received.shape[0], *self.like.shape[1:])


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
