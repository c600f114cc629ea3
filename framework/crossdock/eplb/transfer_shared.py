"""Transfers between CPU ranks of one machine: spare slots lie in memory that all of them see, and who sends writes there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from crossdock.eplb.spare_slots import SlotBytes, SpareSlots
from crossdock.eplb.transfer import SliceTransfer, Ticket, TransferTicket
from crossdock.eplb.transfer_worker import TransferWorker
from crossdock.shared_memory import machine_name, share_memory
from crossdock.types.comm import GroupComm

ALIGNMENT = 64
"""Of a rank's slots in the memory: a cache line."""


def share_spare_slots(spare: SpareSlots, host: GroupComm) -> list[SlotBytes] | None:
    """Moves ``spare`` into shared memory; the slots of every rank of ``host``, the expert group. None, on all ranks, when they cannot share.

    Collective; before anything lies in ``spare``.
    """
    row_bytes = -(-spare.total_bytes // ALIGNMENT) * ALIGNMENT
    memory = share_memory(host, host.size * row_bytes, machine_name())
    if memory is None:
        return None
    rows = torch.from_numpy(memory).view(host.size, row_bytes)[:, : spare.total_bytes]
    spare.move_to(rows[host.rank])
    return [spare.peer(row) for row in rows]


class SharedCarrier:
    """One copy an expert, by a thread of the sender: through a group of sockets it is four, and they take the cores that the steps need.

    A rank's part is complete when its own copies are; the vote of all ranks says that everything has arrived.
    """

    def __init__(self, peers: Sequence[SlotBytes], host: GroupComm) -> None:
        """``host``: the expert group for CPU tensors."""
        self._peers = peers
        self._host = host
        self._worker = TransferWorker()

    @property
    def has_room(self) -> bool:
        """A switch has read the spare slots when it returns."""
        return True

    def submit(self, transfer: SliceTransfer) -> Ticket:
        return self._worker.submit(transfer, self._carry)

    def release(self) -> None:
        """See ``has_room``."""

    def abandon(self) -> None:
        """What was given up is not written; what the others still write has ended when all ranks have come to ``renew``."""
        self._worker.stop()

    def renew(self) -> None:
        self._host.all_gather(torch.zeros(1, dtype=torch.int64))
        self._worker = TransferWorker()

    def close(self) -> None:
        self._worker.end()

    def _carry(self, ticket: TransferTicket) -> None:
        ticket.unless_given_up(partial(self._write, ticket.transfer))

    def _write(self, transfer: SliceTransfer) -> None:
        for copy in transfer.copies:
            copy()
        for one in transfer.sends:
            parts = one.parts()
            end = one.begin + sum(part.shape[0] for part in parts)
            for target, part in zip(self._peers[one.rank].parts(one.slot, one.begin, end), parts, strict=True):
                target.copy_(part)
