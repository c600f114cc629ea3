"""What a rank is at between decisions: making a plan, or staging a layer."""

from __future__ import annotations

import time
from collections import deque

import attrs
import numpy as np
import numpy.typing as npt
import torch

from crossdock.eplb.ballot import Vote
from crossdock.eplb.history import RebalanceProgress
from crossdock.eplb.layer_plan import LayerPlan
from crossdock.eplb.layer_transfer import LayerTransfer
from crossdock.eplb.live_placement import LivePlacement
from crossdock.eplb.load_segments import PendingTotals
from crossdock.eplb.orders import Pending, PlannedMove, PlanningDesk
from crossdock.eplb.settings import EplbSettings
from crossdock.eplb.transfer import SliceCarrier
from crossdock.errors import CrossdockError, RuntimeFault
from crossdock.types.comm import GroupComm
from crossdock.types.placement import Placement


@attrs.define(kw_only=True, eq=False)
class CountingJob:
    """Counts of all ranks are on their way to the host: a step does not wait for the device to have come so far."""

    progress: RebalanceProgress
    pending: PendingTotals
    num_passes: int
    """That the counts are of."""
    deadline: float
    activity: str = attrs.field(default="counting", init=False)

    def vote(self, now: float) -> tuple[Vote, str]:
        if self.pending.is_done:
            return Vote.DONE, ""
        return (Vote.LATE, "the counts of experts did not arrive in time") if now > self.deadline else (Vote.BUSY, "")

    def wait_briefly(self, seconds: float) -> None:
        time.sleep(seconds)


@attrs.define(kw_only=True, eq=False)
class PlanningJob:
    """The first rank plans; the others have nothing to do and say so."""

    progress: RebalanceProgress
    plan: Pending[PlannedMove] | None
    """None on the other ranks."""
    deadline: float
    slots: npt.NDArray[np.int64] | None = attrs.field(default=None, init=False)
    """[L, P]: the plan, once every rank has it. It is judged a step later: no step pays for both."""
    activity: str = attrs.field(default="planning", init=False)

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

    def share(self, world: GroupComm, live: LivePlacement) -> None:
        """The first rank's ``slots`` on every rank; their forecast goes to ``progress``. A collective of host tensors."""
        # One message: four numbers, then the slots.
        message = torch.zeros(4 + live.slots.size, dtype=torch.int64)
        numbers, slots = message[:4].view(torch.float64), message[4:].view(live.slots.shape)
        if self.plan is not None:
            planned = self.plan.result
            numbers[0], numbers[1] = planned.gain_s, planned.price_s
            numbers[2], numbers[3] = planned.balancedness_before, planned.balancedness_after
            slots.copy_(torch.from_numpy(planned.slots.array().copy()))
        message = world.broadcast(message, 0)
        gain_s, price_s, before, after = message[:4].view(torch.float64).tolist()
        self.slots = message[4:].view(live.slots.shape).numpy()
        self.progress.predicted(gain_s=gain_s, price_s=price_s, before=before, after=after)

    def placement(self, num_experts: int) -> Placement:
        """What was shared. Replica lists are as long as they have to be: of 58 layers of 256 experts the longest take 2 ms."""
        assert self.slots is not None, "it was shared"
        numbered = self.slots + num_experts * np.arange(len(self.slots))[:, None]
        most = int(np.bincount(numbered.ravel()).max())
        return Placement.from_physical(self.slots, num_experts, max_replicas=most)


@attrs.define(kw_only=True, eq=False)
class MovingJob:
    """Layers on their way, one after the other."""

    progress: RebalanceProgress
    placement: Placement
    live: LivePlacement
    carrier: SliceCarrier
    settings: EplbSettings
    desk: PlanningDesk
    rows: deque[int]
    """Layers that have not switched, the one under way first."""
    deadline: float = 0.0
    """When the layer, or its next slice, is late."""
    is_open: bool = attrs.field(default=False, init=False)
    """Every rank has prepared the layer and has room for it: experts may be sent."""
    is_staged: bool = attrs.field(default=False, init=False)
    """Every rank has sent everything; only where what arrived is checked."""
    transfer: LayerTransfer | None = attrs.field(default=None, init=False)
    groups: deque[tuple[int, ...]] = attrs.field(factory=deque[tuple[int, ...]], init=False)
    """Of the layer that is switching."""
    _prepared: deque[Pending[LayerPlan]] = attrs.field(factory=deque[Pending[LayerPlan]], init=False)

    @property
    def activity(self) -> str:
        return "switching" if self.groups else "staging" if self.is_open else "preparing"

    @property
    def _slices_left(self) -> int:
        return 0 if self.transfer is None else self.transfer.slices_left

    def start_layer(self, now: float) -> None:
        """The first of ``rows``."""
        self.transfer = None
        self.is_open = self.is_staged = False
        self.deadline = now + self.settings.late_s
        if not self._prepared:
            self._prepare(self.rows[0])

    def vote(self, now: float) -> tuple[Vote, str]:
        """Prepares, or hands over the next slice; where this rank is, and what is wrong where something is."""
        left = self._slices_left
        try:
            is_done = self._advance() if self.is_open else self._is_prepared()
        except CrossdockError as error:
            return Vote.FAILED, str(error)
        if self._slices_left < left:
            self.deadline = now + self.settings.late_s
        if is_done:
            return Vote.DONE, ""
        if now <= self.deadline:
            return Vote.BUSY, ""
        return Vote.LATE, f"experts of MoE layer row {self.rows[0]} did not arrive in time"

    def next_phase(self) -> None:
        """Every rank is done with what it was at. A layer that is ready switches from the next step on: this one has voted."""
        assert self.transfer is not None, "it was prepared"
        if not self.is_open:
            self.is_open = True
            self._advance()
            # Beside this layer's steps, so that none waits for it.
            if len(self.rows) > 1:
                self._prepare(self.rows[1])
        elif self.live.canaries and not self.is_staged:
            self.is_staged = True
        else:
            self.groups.extend(self.transfer.plan.groups)

    def wait_briefly(self, seconds: float) -> None:
        if self.transfer is None:
            self._prepared[0].wait_briefly(seconds)
        else:
            self.transfer.wait_briefly(seconds)

    def give_up(self) -> None:
        """What still arrives is dropped."""
        if self.transfer is not None:
            self.transfer.give_up()

    def _prepare(self, row: int) -> None:
        order = self.live.layer_order(row, self.placement, self.settings.max_step_bytes)
        self._prepared.append(self.desk.layer(order))

    def _is_prepared(self) -> bool:
        if self.transfer is None:
            prepared = self._prepared[0]
            if not prepared.is_done:
                return False
            if prepared.error is not None:
                raise RuntimeFault(f"the moves of MoE layer row {self.rows[0]}: {_named(prepared.error)}")
            self._prepared.popleft()
            self.transfer = self.live.transfer(prepared.result, self.carrier)
        return self.carrier.has_room

    def _advance(self) -> bool:
        assert self.transfer is not None, "it was prepared"
        if self.is_staged:
            self.transfer.check_canary()
            return True
        return self.transfer.advance()


def _named(error: BaseException) -> str:
    return str(error) if isinstance(error, CrossdockError) else f"{type(error).__name__}: {error}"
