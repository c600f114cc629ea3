"""Point-to-point transfers over gloo, by way of host memory."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from crossdock.comm_gloo import c10d
from crossdock.eplb.transfer import SliceTransfer, Ticket, TransferTicket
from crossdock.eplb.transfer_worker import TransferWorker

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class GlooCarrier:
    """Bytes go through the host, whatever the device."""

    def __init__(self, ranks: Sequence[int], partition: Sequence[Sequence[int]], timeout_s: float) -> None:
        """Collective over all ranks of the job.

        Args:
            ranks: global ranks of this rank's expert group, in group order.
            partition: all expert groups; every rank creates all of them in this order.
            timeout_s: a transfer without progress for so long has failed.
        """
        self._ranks = tuple(ranks)
        self._partition = [list(members) for members in partition]
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._group, self._worker = self._create_group(), TransferWorker()

    @property
    def has_room(self) -> bool:
        return True

    def submit(self, transfer: SliceTransfer) -> Ticket:
        return self._worker.submit(transfer, partial(self._carry, self._group))

    def release(self) -> None:
        """What arrives is written by this rank alone, behind its own copies."""

    def abandon(self) -> None:
        """The thread gives up by itself, by the timeout of its group."""
        self._worker.stop()

    def renew(self) -> None:
        # Whichever rank failed, a fresh group on every rank is the only state that all can be sure of.
        self._group, self._worker = self._create_group(), TransferWorker()

    def close(self) -> None:
        if self._worker.end():
            c10d.destroy_process_group(self._group)

    def _create_group(self) -> ProcessGroup:
        return own_group(self._ranks, self._partition, backend="gloo", timeout=self._timeout)

    def _carry(self, group: ProcessGroup, ticket: TransferTicket) -> None:
        transfer = ticket.transfer
        buffers = [torch.empty(one.num_bytes, dtype=torch.uint8) for one in transfer.receives]
        works = [
            c10d.irecv(buffer, self._ranks[one.rank], group=group, tag=one.tag)
            for one, buffer in zip(transfer.receives, buffers, strict=True)
        ]
        # Buffers of sends live until their transfer is over.
        sent = [one.read().cpu() for one in transfer.sends]
        works += [
            c10d.isend(data, self._ranks[one.rank], group=group, tag=one.tag)
            for one, data in zip(transfer.sends, sent, strict=True)
        ]
        for work in works:
            work.wait()
        ticket.write(buffers)


def own_group(
    ranks: tuple[int, ...],
    partition: Sequence[list[int]],
    *,
    backend: str,
    timeout: datetime.timedelta,
    pg_options: Any = None,
) -> ProcessGroup:
    """Creates all groups of the partition, in this order, on every rank; the one of ``ranks``. ``pg_options``: the backend's own."""
    made: list[ProcessGroup] = [
        c10d.new_group(members, timeout=timeout, backend=backend, pg_options=pg_options) for members in partition
    ]
    return next(group for group, members in zip(made, partition, strict=True) if tuple(members) == ranks)
