"""Orders worked out by a thread of the rank: where steps take long, or there is no other processor to use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from crossdock.eplb.background import Background, SideThread
from crossdock.eplb.layer_plan import LayerPlan
from crossdock.eplb.orders import LayerOrder, Pending, PlannedMove, PlanOrder
from crossdock.types.placement import EplbAlgo

T = TypeVar("T")


class ThreadDesk:
    """One order after the other. While the thread computes, the step thread shares the interpreter with it."""

    def __init__(self, algo: EplbAlgo) -> None:
        self._algo = algo
        self._thread = SideThread("expert planner")
        self._last: Background[PlannedMove] | Background[LayerPlan] | None = None

    def plan(self, order: PlanOrder) -> Pending[PlannedMove]:
        return self._handed_over(partial(order.run, self._algo))

    def layer(self, order: LayerOrder) -> Pending[LayerPlan]:
        return self._handed_over(order.run)

    def abandon(self) -> None:
        """A new thread, where the old one is at something: it cannot be stopped, ends by itself, and nobody looks."""
        if self._last is not None and not self._last.is_done:
            self._thread.stop()
            self._thread = SideThread("expert planner")

    def close(self) -> None:
        self._thread.stop()

    def _handed_over(self, make: Callable[[], T]) -> Background[T]:
        work = Background(make)
        self._last = work  # type: ignore[assignment]
        self._thread.put(work.run)
        return work
