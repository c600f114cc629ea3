"""What the planning thread does: a plan, and what it wins and costs."""

from __future__ import annotations

import attrs
import torch

from crossdock.eplb.background import Background
from crossdock.eplb.live_placement import LivePlacement
from crossdock.eplb.prediction import Forecast, Rates, forecast
from crossdock.types.placement import EplbAlgo, ExpertLoad, Placement, Topology


@attrs.frozen(kw_only=True, eq=False)
class PlannedMove:
    """A placement with its forecast."""

    placement: Placement
    forecast: Forecast


@attrs.frozen(kw_only=True, eq=False)
class PlanningWork:
    """A snapshot: nobody changes what is in it."""

    algo: EplbAlgo
    load: ExpertLoad
    topology: Topology
    current: Placement
    slot_bytes: int
    passes_to_next: int
    rates: Rates

    def run(self) -> PlannedMove:
        """Plans and judges."""
        placement = self.algo.plan(self.load, self.topology, self.current)
        judged = forecast(
            self.current,
            placement,
            self.load.total,
            self.topology,
            slot_bytes=self.slot_bytes,
            passes_to_next=self.passes_to_next,
            rates=self.rates,
        )
        return PlannedMove(placement=placement, forecast=judged)


def start_planning(
    algo: EplbAlgo, counts: torch.Tensor, live: LivePlacement, *, passes_to_next: int, rates: Rates
) -> Background[PlannedMove]:
    """Beside the step, with copies of everything that is read. ``counts``: [segments, L, E] on the host."""
    work = PlanningWork(
        algo=algo,
        load=ExpertLoad(counts=counts.numpy()),
        topology=live.topology,
        current=live.placement(),
        slot_bytes=live.spare.slot_bytes,
        passes_to_next=passes_to_next,
        rates=rates,
    )
    return Background(work.run).start("expert planner")
