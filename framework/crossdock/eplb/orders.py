"""What is worked out beside the steps, as plain values that can cross to another process. No torch here."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from crossdock.eplb.layer_plan import LayerPlan, MoveBudget, plan_layer
from crossdock.eplb.prediction import Rates, forecast
from crossdock.types.placement import EplbAlgo, ExpertLoad, Placement, Topology

T_co = TypeVar("T_co", covariant=True)


@attrs.frozen(kw_only=True)
class Numbers:
    """An array."""

    shape: tuple[int, ...]
    dtype: str
    data: bytes

    @staticmethod
    def of(array: npt.NDArray[Any]) -> Numbers:
        """A copy of ``array``."""
        return Numbers(shape=array.shape, dtype=array.dtype.str, data=array.tobytes())

    def array(self) -> npt.NDArray[Any]:
        """Read-only."""
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)


@attrs.frozen(kw_only=True)
class PlanOrder:
    """A snapshot to plan from."""

    counts: Numbers
    """[steps, L, E]."""
    current: Numbers
    """[L, P] slots in force."""
    topology: Topology
    slot_bytes: int
    passes_to_next: int
    rates: Rates

    def run(self, algo: EplbAlgo) -> PlannedMove:
        """Plans and judges."""
        load = ExpertLoad(counts=self.counts.array())
        current = Placement.from_physical(self.current.array(), load.num_logical_experts)
        placement = algo.plan(load, self.topology, current)
        judged = forecast(
            current,
            placement,
            load.total,
            self.topology,
            slot_bytes=self.slot_bytes,
            passes_to_next=self.passes_to_next,
            rates=self.rates,
        )
        return PlannedMove(
            slots=Numbers.of(placement.physical_to_logical),
            gain_s=judged.gain_s,
            price_s=judged.price_s,
            balancedness_before=judged.balancedness_before,
            balancedness_after=judged.balancedness_after,
        )


@attrs.frozen(kw_only=True)
class PlannedMove:
    """A placement with its forecast (see ``Forecast``)."""

    slots: Numbers
    """[L, P] int64."""
    gain_s: float
    price_s: float
    balancedness_before: float
    balancedness_after: float


@attrs.frozen(kw_only=True)
class LayerOrder:
    """How a layer goes from slot list ``old`` to ``new``, for one rank."""

    row: int
    old: tuple[int, ...]
    new: tuple[int, ...]
    topology: Topology
    budget: MoveBudget
    ep_rank: int

    def run(self) -> LayerPlan:
        return plan_layer(self.row, self.old, self.new, self.topology, self.budget, self.ep_rank)


class Pending(Protocol[T_co]):
    """Work beside the step: the step thread looks whether it is done, and never waits."""

    @property
    def error(self) -> BaseException | None: ...

    @property
    def is_done(self) -> bool:
        """``result`` or ``error`` is set."""
        ...

    @property
    def result(self) -> T_co:
        """Only when it is done without an error."""
        ...

    def wait_briefly(self, seconds: float) -> None:
        """Gives it time, when the ranks have nothing else to do."""
        ...


class PlanningDesk(Protocol):
    """Takes orders of one rank."""

    def plan(self, order: PlanOrder) -> Pending[PlannedMove]: ...

    def layer(self, order: LayerOrder) -> Pending[LayerPlan]: ...

    def abandon(self) -> None:
        """Nobody waits for open orders any more."""
        ...

    def close(self) -> None: ...
