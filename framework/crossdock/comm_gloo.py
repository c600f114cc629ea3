"""Collectives of one group over gloo: ranks on several machines, and CPU tensors of GPU jobs."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from crossdock.comm_all_to_all import AllToAllComm, PendingBytes, rows_as_bytes
from crossdock.errors import RankLost

c10d: Any = dist
"""torch.distributed declares no argument types."""


@attrs.frozen(kw_only=True, eq=False)
class GlooComm(AllToAllComm):
    """``GroupComm`` over a gloo process group; tensors on the CPU."""

    group: ProcessGroup

    def _begin(self, rows: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> PendingBytes:
        received = torch.empty((sum(recv_counts), rows.shape[1]), dtype=torch.uint8)
        with self.named_failure("all_to_all"):
            work = c10d.all_to_all_single(
                received, rows, list(recv_counts), list(send_counts), group=self.group, async_op=True
            )
        return GlooPendingBytes(comm=self, work=work, sent=rows, received=received)

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
class GlooPendingBytes:
    """An all-to-all in flight; keeps its buffers alive."""

    comm: GlooComm
    work: dist.Work
    sent: torch.Tensor
    received: torch.Tensor

    def wait(self) -> torch.Tensor:
        with self.comm.named_failure("all_to_all"):
            self.work.wait()
        return self.received
