"""What a rank is at between decisions: making a plan, or staging a layer."""

from __future__ import annotations

import attrs
import torch

from crossdock.eplb.background_plan import BackgroundPlan
from crossdock.eplb.ballot import Vote
from crossdock.eplb.history import RebalanceProgress
from crossdock.eplb.layer_transfer import LayerTransfer
from crossdock.eplb.live_placement import LivePlacement
from crossdock.errors import CrossdockError
from crossdock.types.comm import GroupComm
from crossdock.types.placement import Placement


@attrs.define(kw_only=True, eq=False)
class PlanningJob:
    """The first rank plans; the others have nothing to do and say so."""

    progress: RebalanceProgress
    plan: BackgroundPlan | None
    """None on the other ranks."""
    deadline: float

    def vote(self, now: float) -> tuple[Vote, str]:
        """Where this rank is, and what is wrong where something is."""
        if self.plan is None:
            return Vote.DONE, ""
        if not self.plan.is_done:
            return (Vote.LATE, "the plan is not ready in time") if now > self.deadline else (Vote.BUSY, "")
        error = self.plan.error
        return (Vote.DONE, "") if error is None else (Vote.FAILED, f"the planner failed: {_named(error)}")

    def wait_briefly(self, seconds: float) -> None:
        if self.plan is not None:
            self.plan.wait_briefly(seconds)

    def share(self, world: GroupComm, live: LivePlacement) -> Placement:
        """The first rank's placement on every rank; its forecast goes to ``progress``. A collective of host tensors."""
        shape = live.slots.shape
        numbers = torch.zeros(4, dtype=torch.float64)
        slots = torch.zeros(shape, dtype=torch.int64)
        if self.plan is not None:
            planned = self.plan.result
            assert planned is not None, "it voted that it is done"
            judged = planned.forecast
            numbers = torch.tensor(
                [judged.gain_s, judged.price_s, judged.balancedness_before, judged.balancedness_after],
                dtype=torch.float64,
            )
            slots = torch.from_numpy(planned.placement.physical_to_logical.copy())
        numbers, slots = world.broadcast(numbers, 0), world.broadcast(slots, 0)
        gain_s, price_s, before, after = numbers.tolist()
        self.progress.predicted(gain_s=gain_s, price_s=price_s, before=before, after=after)
        return Placement.from_physical(slots.numpy(), live.maps.replica_counts.shape[1])


@attrs.define(kw_only=True, eq=False)
class MovingJob:
    """One layer on its way, and those that follow."""

    progress: RebalanceProgress
    placement: Placement
    transfer: LayerTransfer
    rows_after: tuple[int, ...]
    deadline: float

    def vote(self, now: float) -> tuple[Vote, str]:
        """Hands over the next slice; where this rank is, and what is wrong where something is."""
        try:
            is_done = self.transfer.advance()
        except CrossdockError as error:
            return Vote.FAILED, str(error)
        if is_done:
            return Vote.DONE, ""
        if now <= self.deadline:
            return Vote.BUSY, ""
        return Vote.LATE, f"experts of MoE layer row {self.transfer.moves.layer} did not arrive in time"

    def wait_briefly(self, seconds: float) -> None:
        self.transfer.wait_briefly(seconds)


def _named(error: BaseException) -> str:
    return str(error) if isinstance(error, CrossdockError) else f"{type(error).__name__}: {error}"
