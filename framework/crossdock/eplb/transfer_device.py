"""What carriers between GPUs have in common: a stream beside the step, on which the step thread enqueues a slice and never waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs
import torch


@attrs.frozen(eq=False)
class DeviceTicket:
    """``Ticket`` of a slice on a stream. What it writes cannot be called back: see ``SliceCarrier.abandon``."""

    arrived: torch.cuda.Event | None = None
    error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return self.arrived is None or self.arrived.query()

    def wait_briefly(self, seconds: float) -> None:
        if not self.is_done:
            time.sleep(seconds)

    def give_up(self) -> None:
        """The carrier is abandoned next."""


class SideStream:
    """Of one carrier on the current GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self.device)
        self._released: torch.cuda.Event | None = None

    @property
    def is_released(self) -> bool:
        """The step's stream has passed the last ``release``."""
        return self._released is None or self._released.query()

    def release(self) -> None:
        """What is enqueued on the step's stream now is the last that reads the spare slots."""
        self._released = torch.cuda.Event()
        self._released.record(torch.cuda.current_stream(self.device))

    def enqueued(self, work: Callable[[], None]) -> DeviceTicket:
        """Enqueues beside the step that is running, not behind it: who asks has seen ``is_released``, so nothing there touches what is
        read and written here. Behind the step, copies would meet the uploads at the start of the next one in the same copy engines."""
        try:
            with torch.cuda.stream(self._stream):
                work()
                arrived = torch.cuda.Event()
                arrived.record(self._stream)
        except Exception as error:  # noqa: BLE001 - told through the ticket, as by carriers with a thread
            return DeviceTicket(error=error)
        return DeviceTicket(arrived)

    def synchronize(self) -> None:
        """Waits until everything enqueued is over."""
        self._stream.synchronize()
