"""Orders worked out by threads of the rank: where steps take long, or there is no other processor to use."""

from __future__ import annotations

from functools import partial

import attrs

from crossdock.eplb.background import Background
from crossdock.eplb.layer_plan import LayerPlan
from crossdock.eplb.orders import LayerOrder, Pending, PlannedMove, PlanOrder
from crossdock.types.placement import EplbAlgo


@attrs.frozen(eq=False)
class ThreadDesk:
    """A thread an order. While it computes, the step thread shares the interpreter with it."""

    algo: EplbAlgo

    def plan(self, order: PlanOrder) -> Pending[PlannedMove]:
        return Background(partial(order.run, self.algo)).start("expert planner")

    def layer(self, order: LayerOrder) -> Pending[LayerPlan]:
        return Background(order.run).start("expert moves")

    def abandon(self) -> None:
        """Threads cannot be stopped: they end by themselves, and nobody looks."""

    def close(self) -> None:
        """Nothing is kept."""
