"""What carriers between GPUs have in common: a stream beside the step, on which the step thread enqueues a slice and never waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

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
        """Enqueues behind what the step's stream has now: it wrote what is sent."""
        try:
            with self.behind_step() as stream:
                work()
                arrived = torch.cuda.Event()
                arrived.record(stream)
        except Exception as error:  # noqa: BLE001 - told through the ticket, as by carriers with a thread
            return DeviceTicket(error=error)
        return DeviceTicket(arrived)

    @contextmanager
    def behind_step(self) -> Generator[torch.cuda.Stream]:
        """The stream as the current one."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield self._stream

    def synchronize(self) -> None:
        """Waits until everything enqueued is over."""
        self._stream.synchronize()
