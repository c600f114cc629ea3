"""Slices of experts on their way between ranks: what is sent and received, and where it stands.

The step thread hands slices over and looks whether they are done; it never waits. Transfers use a process group of their own, so that
they cannot meet the collectives of a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import torch


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

    def abandon(self) -> None:
        """After a failure: what is under way will not be waited for. Every rank calls it after the same step."""
        ...

    def renew(self) -> None:
        """Makes an abandoned carrier work again. A collective: every rank calls it before the next attempt."""
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

    def abandon(self) -> None:
        """Nothing is under way."""

    def renew(self) -> None:
        """Nothing was lost."""

    def close(self) -> None:
        """Nothing is open."""
