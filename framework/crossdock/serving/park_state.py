"""Whether the ranks are parked, as the frontend sees it, and the one wake that ends each park."""

from __future__ import annotations

import attrs

from crossdock.types.link import Wake


@attrs.define
class ParkState:
    """Ranks park together after a step; each replica's report of it arrives at its own time."""

    _parked_step: int = -1
    _woken_step: int = -1

    def parked(self, step: int) -> None:
        """A replica parked after ``step``; a report about a park that was ended already changes nothing."""
        self._parked_step = max(self._parked_step, step)

    def wake(self) -> Wake | None:
        """The wake to send to every rank when there is work: None when the last known park was ended before."""
        if self._parked_step <= self._woken_step:
            return None
        self._woken_step = self._parked_step
        return Wake(step=self._woken_step)
