"""Slices of experts on their way between ranks: what is sent and received, and where it stands.

The step thread hands slices over and looks whether they are done; it never waits. Transfers have a process group, or memory, of their own,
so that they cannot meet the collectives of a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import attrs
import torch

from crossdock.eplb.spare_slots import SlotBytes


@attrs.frozen(kw_only=True, eq=False)
class Outgoing:
    """Bytes for another rank; read when the slice's turn comes."""

    rank: int
    """EP rank that receives."""
    tag: int
    parts: Callable[[], Sequence[torch.Tensor]]
    """uint8 [n] each, to be laid end to end: views of what is sent, not copies."""
    slot: int = 0
    """Spare slot of the receiver."""
    begin: int = 0
    """Byte of that slot where they go."""

    def read(self) -> torch.Tensor:
        """The bytes in one piece; a copy."""
        return torch.cat(tuple(self.parts()))


@attrs.frozen(kw_only=True, eq=False)
class Arriving:
    """Bytes from another rank."""

    rank: int
    """EP rank that sends."""
    tag: int
    num_bytes: int
    parts: Callable[[], Sequence[torch.Tensor]]
    """uint8 [n] each, end to end: where they go."""

    def write(self, data: torch.Tensor) -> None:
        """Puts complete bytes, in one piece, where they go."""
        parts = self.parts()
        for part, piece in zip(parts, data.split([part.shape[0] for part in parts]), strict=True):
            part.copy_(piece)


@attrs.frozen(kw_only=True, eq=False)
class SliceTransfer:
    """One rank's part of a slice."""

    sends: Sequence[Outgoing] = ()
    receives: Sequence[Arriving] = ()
    copies: Sequence[Callable[[], None]] = ()
    """Copies within the rank."""

    def write_to(self, peers: Sequence[SlotBytes]) -> None:
        """Copies within the rank, and what is sent straight into the spare slots of the others (``peers``: of each rank), which can be
        written from here. On a device it is enqueued and not waited for."""
        for copy in self.copies:
            copy()
        for one in self.sends:
            parts = one.parts()
            end = one.begin + sum(part.shape[0] for part in parts)
            for target, part in zip(peers[one.rank].parts(one.slot, one.begin, end), parts, strict=True):
                target.copy_(part, non_blocking=True)


class Ticket(Protocol):
    """Where a slice stands."""

    @property
    def error(self) -> BaseException | None:
        """Why it failed, once it is done."""
        ...

    @property
    def is_done(self) -> bool:
        """This rank's part is complete, or ``error`` says why not."""
        ...

    def wait_briefly(self, seconds: float) -> None:
        """Gives the carrier time, when the ranks have nothing else to do."""
        ...

    def give_up(self) -> None:
        """What has not arrived is not written; with carriers on a device, from ``SliceCarrier.abandon`` on."""
        ...


@attrs.define(eq=False)
class TransferTicket:
    """``Ticket`` of a slice that a thread carries."""

    transfer: SliceTransfer
    error: BaseException | None = None
    finished: threading.Event = attrs.field(factory=threading.Event)
    _is_given_up: bool = attrs.field(default=False, init=False)
    _writing: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    @property
    def is_done(self) -> bool:
        """All bytes are there, or ``error`` says why not."""
        return self.finished.is_set()

    def wait_briefly(self, seconds: float) -> None:
        self.finished.wait(seconds)

    def give_up(self) -> None:
        """Nothing is written after this returns: the spare slots may be used for something else."""
        with self._writing:
            self._is_given_up = True

    def unless_given_up(self, write: Callable[[], None]) -> None:
        """Calls ``write``; ``give_up`` waits for its end."""
        with self._writing:
            if not self._is_given_up:
                write()

    def write(self, buffers: Sequence[torch.Tensor]) -> None:
        """Puts what arrived, and what is copied within the rank, where it belongs."""

        def put() -> None:
            for copy in self.transfer.copies:
                copy()
            for one, buffer in zip(self.transfer.receives, buffers, strict=True):
                one.write(buffer)

        self.unless_given_up(put)


class SliceCarrier(Protocol):
    """Carries slices of this rank. Ranks submit the slices that concern them in the same order."""

    @property
    def has_room(self) -> bool:
        """Others may write to this rank's spare slots: nothing that reads them is under way."""
        ...

    def submit(self, transfer: SliceTransfer) -> Ticket:
        """Only while every rank has room."""
        ...

    def release(self) -> None:
        """The spare slots were read for the last time: a layer has switched."""
        ...

    def abandon(self) -> None:
        """After a failure: what is under way will not be waited for. Every rank calls it after the same step."""
        ...

    def renew(self) -> None:
        """Makes an abandoned carrier work again. A collective: every rank calls it before the next attempt."""
        ...

    def close(self) -> None: ...


@attrs.frozen(eq=False)
class WrittenTicket:
    """``Ticket`` of a slice that the step thread has written itself."""

    error: BaseException | None
    is_done: bool = attrs.field(default=True, init=False)

    @staticmethod
    def of(write: Callable[[], None]) -> WrittenTicket:
        """Calls ``write``; the ticket tells how it ended."""
        try:
            write()
        except Exception as error:  # noqa: BLE001 - told through the ticket, as by carriers that take time
            return WrittenTicket(error)
        return WrittenTicket(None)

    def wait_briefly(self, seconds: float) -> None:
        """It is done."""

    def give_up(self) -> None:
        """It is done: what was written lies in spare slots, and nobody reads it."""


class LocalCarrier:
    """An expert group of one rank: nothing but copies, done at once."""

    @property
    def has_room(self) -> bool:
        return True

    def submit(self, transfer: SliceTransfer) -> Ticket:
        return WrittenTicket.of(partial(transfer.write_to, ()))

    def release(self) -> None:
        """Copies are in order."""

    def abandon(self) -> None:
        """Nothing is under way."""

    def renew(self) -> None:
        """Nothing was lost."""

    def close(self) -> None:
        """Nothing is open."""
