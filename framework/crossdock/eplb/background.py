"""Work beside the step: a thread works on a snapshot, the step thread looks whether it is done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import attrs

T = TypeVar("T")


@attrs.define(eq=False)
class Background(Generic[T]):
    """One piece of work. A daemon thread: work that hangs does not keep the process alive."""

    make: Callable[[], T]
    """Pure work on data that nobody changes."""
    error: BaseException | None = attrs.field(default=None, init=False)
    _result: T | None = attrs.field(default=None, init=False)
    _finished: threading.Event = attrs.field(factory=threading.Event, init=False)

    def start(self, name: str) -> Background[T]:
        """Starts the thread; returns itself."""
        threading.Thread(target=self._run, daemon=True, name=name).start()
        return self

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

    def _run(self) -> None:
        try:
            self._result = self.make()
        except BaseException as error:  # noqa: BLE001 - the step thread is told through ``error``
            self.error = error
        self._finished.set()
