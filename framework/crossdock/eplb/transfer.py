"""Moves bytes between ranks beside the step: a thread of its own, point to point, one slice after the other.

The step thread hands slices over and looks whether they are done; it never waits. Transfers use a process group of their own, so that
they cannot meet the collectives of a step.
"""

from __future__ import annotations

import datetime
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import torch

from crossdock.comm_gloo import c10d
from crossdock.errors import TransferFailed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_END_S = 1.0
"""How long the end of a rank waits for a transfer that is under way."""


@attrs.frozen(kw_only=True, eq=False)
class Outgoing:
    """Bytes for another rank; read when the slice's turn comes."""

    rank: int
    """EP rank that receives."""
    tag: int
    read: Callable[[], torch.Tensor]


@attrs.frozen(kw_only=True, eq=False)
class Arriving:
    """Bytes from another rank; written once they are complete."""

    rank: int
    """EP rank that sends."""
    tag: int
    num_bytes: int
    write: Callable[[torch.Tensor], None]


@attrs.frozen(kw_only=True, eq=False)
class SliceTransfer:
    """One rank's part of a slice."""

    sends: Sequence[Outgoing] = ()
    receives: Sequence[Arriving] = ()
    copies: Sequence[Callable[[], None]] = ()
    """Copies within the rank."""


@attrs.define(eq=False)
class TransferTicket:
    """Where a slice stands."""

    transfer: SliceTransfer
    error: BaseException | None = None
    finished: threading.Event = attrs.field(factory=threading.Event)
    _is_given_up: bool = attrs.field(default=False, init=False)
    _writing: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    @property
    def is_done(self) -> bool:
        """All bytes are there, or ``error`` says why not."""
        return self.finished.is_set()

    def give_up(self) -> None:
        """Nothing is written after this returns: the spare slots may be used for something else."""
        with self._writing:
            self._is_given_up = True

    def write(self, buffers: Sequence[torch.Tensor]) -> None:
        """Puts what arrived, and what is copied within the rank, where it belongs."""
        with self._writing:
            if self._is_given_up:
                return
            for copy in self.transfer.copies:
                copy()
            for one, buffer in zip(self.transfer.receives, buffers, strict=True):
                one.write(buffer)


class SliceCarrier(Protocol):
    """Carries slices of this rank. Ranks submit the slices that concern them in the same order."""

    def submit(self, transfer: SliceTransfer) -> TransferTicket: ...

    def renew(self) -> None:
        """After a failure: forgets what is under way. A collective: every rank calls it before the next attempt."""
        ...

    def close(self) -> None: ...


class LocalCarrier:
    """An expert group of one rank: nothing but copies, done at once."""

    def submit(self, transfer: SliceTransfer) -> TransferTicket:
        ticket = TransferTicket(transfer)
        try:
            ticket.write(())
        except Exception as error:  # noqa: BLE001 - told through the ticket, as by the other carrier
            ticket.error = error
        ticket.finished.set()
        return ticket

    def renew(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is open."""


class GlooCarrier:
    """Point-to-point transfers over gloo, by way of host memory."""

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
        self._worker = _Worker(self._create_group(), self._ranks)

    def submit(self, transfer: SliceTransfer) -> TransferTicket:
        return self._worker.submit(transfer)

    def renew(self) -> None:
        # Whichever rank failed, a fresh group on every rank is the only state that all can be sure of.
        self._worker.stop()
        self._worker = _Worker(self._create_group(), self._ranks)

    def close(self) -> None:
        self._worker.end()

    def _create_group(self) -> ProcessGroup:
        made: list[Any] = [
            c10d.new_group(members, timeout=self._timeout, backend="gloo") for members in self._partition
        ]
        own = next(index for index, members in enumerate(self._partition) if tuple(members) == self._ranks)
        group: ProcessGroup = made[own]
        return group


class _Worker:
    """The thread of one process group. A daemon: a transfer that a dead peer keeps waiting must not keep the process alive."""

    def __init__(self, group: ProcessGroup, ranks: Sequence[int]) -> None:
        self._group = group
        self._ranks = ranks
        self._tickets: queue.SimpleQueue[TransferTicket | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="expert transfers")
        self._thread.start()

    def submit(self, transfer: SliceTransfer) -> TransferTicket:
        ticket = TransferTicket(transfer)
        self._tickets.put(ticket)
        return ticket

    def stop(self) -> None:
        """The thread ends after what is under way."""
        self._tickets.put(None)

    def end(self) -> None:
        """Stops, and closes the group unless a transfer still hangs in it."""
        self.stop()
        self._thread.join(_END_S)
        if not self._thread.is_alive():
            c10d.destroy_process_group(self._group)

    def _run(self) -> None:
        while True:
            ticket = self._tickets.get()
            if ticket is None:
                return
            try:
                if self._error is not None:
                    raise TransferFailed(f"an earlier transfer failed: {self._error}")
                self._carry(ticket)
            except BaseException as error:  # noqa: BLE001 - the step thread is told through the ticket
                self._error = error
                ticket.error = error
            ticket.finished.set()

    def _carry(self, ticket: TransferTicket) -> None:
        transfer = ticket.transfer
        buffers = [torch.empty(one.num_bytes, dtype=torch.uint8) for one in transfer.receives]
        works = [
            c10d.irecv(buffer, self._ranks[one.rank], group=self._group, tag=one.tag)
            for one, buffer in zip(transfer.receives, buffers, strict=True)
        ]
        # Buffers of sends live until their transfer is over.
        sent = [one.read().cpu() for one in transfer.sends]
        works += [
            c10d.isend(data, self._ranks[one.rank], group=self._group, tag=one.tag)
            for one, data in zip(transfer.sends, sent, strict=True)
        ]
        for work in works:
            work.wait()
        ticket.write(buffers)
