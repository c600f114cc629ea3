"""The thread beside the step that carries slices, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from crossdock.eplb.background import SideThread
from crossdock.eplb.transfer import SliceTransfer, TransferTicket
from crossdock.errors import TransferFailed

_END_S = 1.0
"""How long the end of a rank waits for a transfer that is under way."""


class TransferWorker:
    """A transfer that a dead peer keeps waiting does not keep the process alive. After a failure all that follows fails."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._thread = SideThread("expert transfers")

    def submit(self, transfer: SliceTransfer, carry: Callable[[TransferTicket], None]) -> TransferTicket:
        """``carry`` runs in the thread and returns when everything has arrived."""
        ticket = TransferTicket(transfer)
        self._thread.put(partial(self._carry, ticket, carry))
        return ticket

    def stop(self) -> None:
        """The thread ends after what is under way."""
        self._thread.stop()

    def end(self) -> bool:
        """Stops; False when a transfer still hangs after a moment."""
        return self._thread.end(_END_S)

    def _carry(self, ticket: TransferTicket, carry: Callable[[TransferTicket], None]) -> None:
        try:
            if self._error is not None:
                raise TransferFailed(f"an earlier transfer failed: {self._error}")
            carry(ticket)
        except BaseException as error:  # noqa: BLE001 - the step thread is told through the ticket
            self._error = error
            ticket.error = error
        ticket.finished.set()
