"""Point-to-point transfers over NCCL, GPU to GPU, on a stream beside the step."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from crossdock.comm_gloo import c10d
from crossdock.eplb.transfer import SliceTransfer, TransferTicket
from crossdock.eplb.transfer_gloo import own_group
from crossdock.eplb.transfer_worker import TransferWorker

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class NcclCarrier:
    """The step thread records an event; the worker enqueues a slice behind it and waits for the GPU, so the step never does.

    NCCL has no tags: parts between two ranks are matched by their order, which is the same on both because both cut the same slices.
    """

    def __init__(self, ranks: Sequence[int], partition: Sequence[Sequence[int]], timeout_s: float) -> None:
        """Collective over all ranks of the job, each with its GPU current; arguments as for ``GlooCarrier``."""
        self._ranks = tuple(ranks)
        self._partition = [list(members) for members in partition]
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self._device)
        self._open()

    def submit(self, transfer: SliceTransfer) -> TransferTicket:
        # Behind the last switch: it read the spare slots and wrote the live ones.
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        return self._worker.submit(transfer, partial(self._carry, self._group, ready))

    def abandon(self) -> None:
        """Ends kernels that wait for a rank that does not come: they would hold multiprocessors, and NCCL's watchdog the process."""
        self._worker.stop()
        self._group.abort()

    def renew(self) -> None:
        self._open()

    def close(self) -> None:
        if self._worker.end():
            c10d.destroy_process_group(self._group)

    def _open(self) -> None:
        self._group = own_group(self._ranks, self._partition, backend="nccl", timeout=self._timeout)
        self._worker = TransferWorker()
        # Once around the ring now: connections are made and kernels loaded, which would stop the GPU in the middle of a step.
        own = self._ranks.index(c10d.get_rank())
        with torch.cuda.stream(self._stream):
            c10d.all_reduce(torch.zeros(1, device=self._device), group=self._group)
            token = torch.zeros(2, dtype=torch.uint8, device=self._device)
            after, before = (self._ranks[(own + step) % len(self._ranks)] for step in (1, -1))
            self._exchange(self._group, [(torch.cat((token[:1], token[:1])), after)], [(token, before)])
        self._stream.synchronize()

    def _carry(self, group: ProcessGroup, ready: torch.cuda.Event, ticket: TransferTicket) -> None:
        transfer = ticket.transfer
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            buffers = [torch.empty(one.num_bytes, dtype=torch.uint8, device=self._device) for one in transfer.receives]
            sends = [(one.read(), self._ranks[one.rank]) for one in transfer.sends]
            receives = [(buffer, self._ranks[one.rank]) for one, buffer in zip(transfer.receives, buffers, strict=True)]
            self._exchange(group, sends, receives)
            ticket.write(buffers)
            arrived = torch.cuda.Event(blocking=True)
            arrived.record(self._stream)
        arrived.synchronize()

    def _exchange(
        self,
        group: ProcessGroup,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
    ) -> None:
        """One batch of (bytes, global rank); the current stream is behind it afterwards."""
        parts = [c10d.P2POp(c10d.isend, data, peer, group=group) for data, peer in sends]
        parts += [c10d.P2POp(c10d.irecv, buffer, peer, group=group) for buffer, peer in receives]
        if parts:
            for work in c10d.batch_isend_irecv(parts):
                work.wait()
