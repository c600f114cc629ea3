"""Collectives of one group over NCCL; order of sums is NCCL's."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from crossdock.comm_all_to_all import check_rows
from crossdock.comm_gloo import c10d
from crossdock.errors import MisuseError

BYTE_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.bool)
"""Types that are moved as bytes."""


@attrs.frozen(kw_only=True, eq=False)
class NcclComm:
    """``GroupComm`` over an NCCL process group; tensors on this rank's GPU, results ordered on the current stream."""

    group: ProcessGroup
    ranks: tuple[int, ...]
    rank: int
    """Index in the group."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        c10d.all_reduce(total, group=self.group)
        return total

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        moved = _movable(x)
        out = moved.new_empty((self.size * x.shape[0], *moved.shape[1:]))
        c10d.all_gather_into_tensor(out, moved, group=self.group)
        return out.view(x.dtype)

    def all_gatherv(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        check_rows("all_gatherv", x.shape[0], counts[self.rank])
        if len(set(counts)) == 1:
            return self.all_gather(x)
        moved = _movable(x)
        out = moved.new_empty((sum(counts), *moved.shape[1:]))
        c10d.all_gather(list(torch.split(out, list(counts))), moved, group=self.group)
        return out.view(x.dtype)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] % self.size:
            raise MisuseError(f"reduce_scatter of {x.shape[0]} rows over {self.size} ranks: pad to a multiple")
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        c10d.reduce_scatter_tensor(out, x.contiguous(), group=self.group)
        return out

    def reduce_scatterv(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        check_rows("reduce_scatterv", x.shape[0], sum(counts))
        if len(set(counts)) == 1:
            return self.reduce_scatter(x)
        out = x.new_empty((counts[self.rank], *x.shape[1:]))
        c10d.reduce_scatter(out, list(torch.split(x.contiguous(), list(counts))), group=self.group)
        return out

    def all_to_all(self, x: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> torch.Tensor:
        return self.all_to_all_begin(x, send_counts, recv_counts).wait()

    def all_to_all_begin(
        self, x: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> NcclPendingRows:
        check_rows("all_to_all", x.shape[0], sum(send_counts))
        sent = _movable(x)
        received = sent.new_empty((sum(recv_counts), *sent.shape[1:]))
        work = c10d.all_to_all_single(
            received, sent, list(recv_counts), list(send_counts), group=self.group, async_op=True
        )
        return NcclPendingRows(work=work, sent=sent, received=received, dtype=x.dtype)

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        moved = _movable(x)
        out = moved if self.rank == source else torch.empty_like(moved)
        c10d.broadcast(out, self.ranks[source], group=self.group)
        return x if self.rank == source else out.view(x.dtype)


@attrs.frozen(kw_only=True, eq=False)
class NcclPendingRows:
    """An all-to-all on NCCL's stream; keeps its buffers alive."""

    work: dist.Work
    sent: torch.Tensor
    received: torch.Tensor
    dtype: torch.dtype

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.received.view(self.dtype)


def _movable(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, as bytes where NCCL does not know the type."""
    return x.contiguous().view(torch.uint8) if x.dtype in BYTE_TYPES else x.contiguous()
