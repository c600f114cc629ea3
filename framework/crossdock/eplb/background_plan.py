"""Plans beside the step: a thread works on a snapshot, the step thread looks whether it is done."""

from __future__ import annotations

import threading
from collections.abc import Callable

import attrs

from crossdock.eplb.prediction import Forecast
from crossdock.types.placement import Placement


@attrs.frozen(kw_only=True, eq=False)
class PlannedMove:
    """A placement with its forecast."""

    placement: Placement
    forecast: Forecast


@attrs.define(eq=False)
class BackgroundPlan:
    """One plan in the making. A daemon thread: a planner that hangs does not keep the process alive."""

    make: Callable[[], PlannedMove]
    """Pure work on a snapshot that nobody changes."""
    result: PlannedMove | None = attrs.field(default=None, init=False)
    error: BaseException | None = attrs.field(default=None, init=False)
    _finished: threading.Event = attrs.field(factory=threading.Event, init=False)

    def start(self) -> BackgroundPlan:
        """Starts the thread; returns itself."""
        threading.Thread(target=self._run, daemon=True, name="expert planner").start()
        return self

    @property
    def is_done(self) -> bool:
        """``result`` or ``error`` is set."""
        return self._finished.is_set()

    def wait_briefly(self, seconds: float) -> None:
        """Gives the thread time, when the ranks have nothing else to do."""
        self._finished.wait(seconds)

    def _run(self) -> None:
        try:
            self.result = self.make()
        except BaseException as error:  # noqa: BLE001 - the step thread is told through ``error``
            self.error = error
        self._finished.set()
