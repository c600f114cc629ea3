"""SIGTERM and SIGINT as events: the first one drains, the second one ends now."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Generator

import attrs


@attrs.define(eq=False)
class Signals:
    """Signals in the order in which they came."""

    received: list[int] = attrs.Factory(list[int])
    _changed: asyncio.Event = attrs.Factory(asyncio.Event)

    @contextlib.contextmanager
    def handled(self) -> Generator[None]:
        """Handles both signals on the running loop while the context lasts."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self._take, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    async def first(self) -> None:
        """Waits for the first signal."""
        await self._count(1)

    async def second(self) -> int:
        """Waits for the second signal; its number."""
        await self._count(2)
        return self.received[1]

    async def _count(self, count: int) -> None:
        while len(self.received) < count:
            self._changed.clear()
            await self._changed.wait()

    def _take(self, number: int) -> None:
        self.received.append(number)
        self._changed.set()
