"""The thread beside the step that carries slices, one after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import attrs

from crossdock.eplb.transfer import SliceTransfer, TransferTicket
from crossdock.errors import TransferFailed

_END_S = 1.0
"""How long the end of a rank waits for a transfer that is under way."""


@attrs.frozen(eq=False)
class _Order:
    ticket: TransferTicket
    carry: Callable[[TransferTicket], None]


class TransferWorker:
    """A daemon thread: a transfer that a dead peer keeps waiting must not keep the process alive. After a failure all that follows fails."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="expert transfers")
        self._thread.start()

    def submit(self, transfer: SliceTransfer, carry: Callable[[TransferTicket], None]) -> TransferTicket:
        """``carry`` runs in the thread and returns when everything has arrived."""
        ticket = TransferTicket(transfer)
        self._orders.put(_Order(ticket, carry))
        return ticket

    def stop(self) -> None:
        """The thread ends after what is under way."""
        self._orders.put(None)

    def end(self) -> bool:
        """Stops; False when a transfer still hangs after a moment."""
        self.stop()
        self._thread.join(_END_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            order = self._orders.get()
            if order is None:
                return
            try:
                if self._error is not None:
                    raise TransferFailed(f"an earlier transfer failed: {self._error}")
                order.carry(order.ticket)
            except BaseException as error:  # noqa: BLE001 - the step thread is told through the ticket
                self._error = error
                order.ticket.error = error
            order.ticket.finished.set()
