"""Point-to-point transfers over NCCL, GPU to GPU, on a stream beside the step."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from crossdock.comm_gloo import c10d
from crossdock.eplb.transfer import SliceTransfer, Ticket
from crossdock.eplb.transfer_device import SideStream
from crossdock.eplb.transfer_gloo import own_group

MAX_CTAS = 4
"""Multiprocessors that a transfer may take from the step: these carry some 100 GB/s between two GPUs of a machine."""


class NcclCarrier:
    """The step thread enqueues a slice and looks later whether it has arrived.

    NCCL has no tags: parts between two ranks are matched by their order, which is the same on both because both cut the same slices.
    """

    def __init__(self, ranks: Sequence[int], partition: Sequence[Sequence[int]], timeout_s: float) -> None:
        """Collective over all ranks of the job, each with its GPU current; arguments as for ``GlooCarrier``."""
        self._ranks = tuple(ranks)
        self._partition = [list(members) for members in partition]
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._side = SideStream()
        self._open()

    @property
    def has_room(self) -> bool:
        return self._side.is_released

    def submit(self, transfer: SliceTransfer) -> Ticket:
        return self._side.enqueued(partial(self._carry, transfer))

    def release(self) -> None:
        self._side.release()

    def abandon(self) -> None:
        """Ends kernels that wait for a rank that does not come: they would hold multiprocessors, and NCCL's watchdog the process."""
        self._group.abort()

    def renew(self) -> None:
        self._side.synchronize()
        self._open()

    def close(self) -> None:
        c10d.destroy_process_group(self._group)

    def _open(self) -> None:
        self._group = own_group(
            self._ranks, self._partition, backend="nccl", timeout=self._timeout, pg_options=_few_multiprocessors()
        )
        # All pairs now: connections are made and kernels loaded, which would stop the GPU in the middle of a step.
        started = self._side.enqueued(self._meet_all)
        if started.error is not None:
            raise started.error
        self._side.synchronize()

    def _meet_all(self) -> None:
        own = self._ranks.index(c10d.get_rank())
        c10d.all_reduce(torch.zeros(1, device=self._side.device), group=self._group)
        others = [rank for index, rank in enumerate(self._ranks) if index != own]
        bytes_out, bytes_in = torch.zeros((2, len(others), 1), dtype=torch.uint8, device=self._side.device)
        self._exchange(list(zip(bytes_out, others, strict=True)), list(zip(bytes_in, others, strict=True)))

    def _carry(self, transfer: SliceTransfer) -> None:
        for copy in transfer.copies:
            copy()
        self._exchange(
            [(part, self._ranks[one.rank]) for one in transfer.sends for part in one.parts()],
            [(part, self._ranks[one.rank]) for one in transfer.receives for part in one.parts()],
        )

    def _exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        """One batch of (bytes, global rank); the current stream is behind it afterwards."""
        parts = [c10d.P2POp(c10d.isend, data, peer, group=self._group) for data, peer in sends]
        parts += [c10d.P2POp(c10d.irecv, data, peer, group=self._group) for data, peer in receives]
        if parts:
            for work in c10d.batch_isend_irecv(parts):
                work.wait()


def _few_multiprocessors() -> Any:
    options = c10d.ProcessGroupNCCL.Options()
    options.config.max_ctas = MAX_CTAS
    return options
