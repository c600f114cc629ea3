"""Transfers between CPU ranks of one machine: spare slots lie in memory that all of them see, and who sends writes there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from crossdock.eplb.spare_slots import SlotBytes, SpareSlots
from crossdock.eplb.transfer import SliceTransfer, Ticket, WrittenTicket
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
    # Every process touches every page now: at the first write to one the system stops it, for as long as the copy takes.
    rows.zero_()
    spare.move_to(rows[host.rank])
    return [spare.peer(row) for row in rows]


class SharedCarrier:
    """One copy an expert, by the step thread itself, which copies a slice in tenths of a millisecond.

    A thread beside the step took a core from one of the ranks and the interpreter from its own step, at any moment of it: more than the copy.
    A rank's part is complete when its own copies are; the vote of all ranks says that everything has arrived.
    """

    def __init__(self, peers: Sequence[SlotBytes]) -> None:
        """``peers``: from ``share_spare_slots``."""
        self._peers = peers

    @property
    def has_room(self) -> bool:
        """A switch has read the spare slots when it returns."""
        return True

    def submit(self, transfer: SliceTransfer) -> Ticket:
        return WrittenTicket.of(partial(transfer.write_to, self._peers))

    def release(self) -> None:
        """See ``has_room``."""

    def abandon(self) -> None:
        """Nothing is under way: every rank has written what it had voted on."""

    def renew(self) -> None:
        """Nothing was lost."""

    def close(self) -> None:
        """The memory goes with its last user."""
