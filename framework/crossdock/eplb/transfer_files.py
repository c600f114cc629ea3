"""Slices of which nothing crosses between ranks: a thread reads experts from the checkpoint and copies within the rank."""

from __future__ import annotations

from functools import partial

import torch

from crossdock.eplb.transfer import SliceTransfer, Ticket, TransferTicket
from crossdock.eplb.transfer_device import SideStream
from crossdock.eplb.transfer_worker import TransferWorker


class FileCarrier:
    """Reading a file takes milliseconds, so the step thread hands it over."""

    def __init__(self, device_type: str) -> None:
        self._side = SideStream() if device_type == "cuda" else None
        self._worker = TransferWorker()

    @property
    def has_room(self) -> bool:
        return self._side is None or self._side.is_released

    def submit(self, transfer: SliceTransfer) -> Ticket:
        return self._worker.submit(transfer, self._carry)

    def release(self) -> None:
        if self._side is not None:
            self._side.release()

    def abandon(self) -> None:
        self._worker.stop()

    def renew(self) -> None:
        self._worker = TransferWorker()

    def close(self) -> None:
        self._worker.end()

    def _carry(self, ticket: TransferTicket) -> None:
        if self._side is None:
            ticket.write(())
            return
        torch.cuda.set_device(self._side.device)
        enqueued = self._side.enqueued(partial(ticket.write, ()))
        if enqueued.error is not None:
            raise enqueued.error
        self._side.synchronize()
