"""Transfers into the memory of other GPUs of the machine: copy engines carry them, no multiprocessor does, and nobody receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from crossdock.comm_nccl import NcclComm
from crossdock.eplb.spare_slots import SlotBytes, SpareSlots
from crossdock.eplb.transfer import SliceTransfer, Ticket
from crossdock.eplb.transfer_device import SideStream
from crossdock.types.comm import GroupComm


def shareable_memory(device: torch.device) -> Callable[[int], torch.Tensor]:
    """Allocates uint8 [n] that other ranks can map."""
    # Imported here: only where GPUs are.
    import torch.distributed._symmetric_memory as symmetric_memory

    return partial(symmetric_memory.empty, dtype=torch.uint8, device=device)


@attrs.frozen(eq=False)
class PeerMemory:
    """Spare slots of every rank of the expert group, to be written from here."""

    slots: Sequence[SlotBytes]
    handle: Any
    """Keeps the mappings alive."""


def peer_memory(spare: SpareSlots, comm: NcclComm, host: GroupComm) -> PeerMemory | None:
    """Maps the others' spare slots; None, on all ranks of the group, when one of them cannot. Collective.

    Args:
        spare: from ``shareable_memory``.
        comm: the expert group.
        host: the same group for CPU tensors.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    found: PeerMemory | None = None
    try:
        handle: Any = symmetric_memory.rendezvous(spare.memory, comm.group)
        memories = [handle.get_buffer(rank, spare.memory.shape, torch.uint8) for rank in range(comm.size)]
        found = PeerMemory([spare.peer(memory) for memory in memories], handle)
    except RuntimeError:
        # No path between these GPUs; the other ranks must hear of it.
        pass
    everyone = host.all_gather(torch.tensor([int(found is not None)]))
    return found if bool(everyone.all()) else None


class PeerCarrier:
    """Each rank writes what it sends into the spare slots of the receiver.

    A rank's part is complete when its own copies are; the vote of all ranks says that everything has arrived.
    """

    def __init__(self, peers: PeerMemory, host: GroupComm) -> None:
        """``host``: the expert group for CPU tensors. Collective."""
        self._peers = peers
        self._host = host
        self._side = SideStream()

    @property
    def has_room(self) -> bool:
        return self._side.is_released

    def submit(self, transfer: SliceTransfer) -> Ticket:
        return self._side.enqueued(partial(transfer.write_to, self._peers.slots))

    def release(self) -> None:
        self._side.release()

    def abandon(self) -> None:
        """Own copies end by themselves; those of the others have ended when all ranks have come to ``renew``."""
        self._side.synchronize()

    def renew(self) -> None:
        self._host.all_gather(torch.zeros(1, dtype=torch.int64))

    def close(self) -> None:
        self._side.synchronize()
