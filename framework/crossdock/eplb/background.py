"""Work beside the step: a thread works on a snapshot, the step thread looks whether it is done."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import attrs

T = TypeVar("T")


class SideThread:
    """Does what it is handed, one after the other. A daemon: work that hangs does not keep the process alive.

    It starts once, with the rank: who starts a thread waits until it runs, which took 3 to 6 ms of a step where all cores were busy.
    """

    def __init__(self, name: str) -> None:
        self._works: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """``work`` keeps its errors to itself."""
        self._works.put(work)

    def stop(self) -> None:
        """The thread ends after what it was handed until now."""
        self._works.put(None)

    def end(self, patience_s: float) -> bool:
        """Stops; False when something still hangs after so long."""
        self.stop()
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work()


@attrs.define(eq=False)
class Background(Generic[T]):
    """One piece of work for a thread."""

    make: Callable[[], T]
    """Pure work on data that nobody changes."""
    error: BaseException | None = attrs.field(default=None, init=False)
    _result: T | None = attrs.field(default=None, init=False)
    _finished: threading.Event = attrs.field(factory=threading.Event, init=False)

    @property
    def is_done(self) -> bool:
        """``result`` or ``error`` is set."""
        return self._finished.is_set()

    @property
    def result(self) -> T:
        """Only when it is done without an error."""
        assert self._result is not None, "it is done and has not failed"
        return self._result

    def wait_briefly(self, seconds: float) -> None:
        """Gives the thread time, when the ranks have nothing else to do."""
        self._finished.wait(seconds)

    def run(self) -> None:
        """In the thread."""
        try:
            self._result = self.make()
        except BaseException as error:  # noqa: BLE001 - the step thread is told through ``error``
            self.error = error
        self._finished.set()
