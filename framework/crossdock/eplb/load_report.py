"""How even the load of ranks was over the last 10, 100 and 1000 passes, told to log, metrics and observers."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Final, Literal

import attrs
import structlog

from crossdock.engine_seams import AgreedStep
from crossdock.observe.recorder_window import LoadWindow
from crossdock.types.comm import GroupComm
from crossdock.types.observer import Observer

_LOG = structlog.get_logger("crossdock.eplb")
WINDOWS: Final = (10, 100, 1000)


@attrs.define(kw_only=True, eq=False)
class LoadReport:
    """``BetweenSteps`` that reports every so many recorded passes; one collective a report."""

    window: LoadWindow
    world: GroupComm
    report: Literal["log", "prometheus", "both"]
    every: int
    gauges: MutableMapping[str, float]
    observers: Sequence[Observer] = ()
    _passes: int = attrs.field(default=0, init=False)

    @property
    def is_busy(self) -> bool:
        """Never: a report takes one call."""
        return False

    def after_step(self, agreed: AgreedStep) -> None:
        if not (agreed.has_rows and agreed.is_counted):
            return
        self._passes += 1
        if self._passes % self.every == 0:
            self._tell(agreed)

    def _tell(self, agreed: AgreedStep) -> None:
        per_layer = self.window.balancedness(self.world, WINDOWS)
        means = {window: sum(values) / len(values) for window, values in per_layer.items()}
        if self.report in ("log", "both") and self.world.rank == 0:
            _LOG.info(
                "balancedness",
                eplb_pass=agreed.plan.eplb_pass,
                **{f"mean_{window}": round(mean, 4) for window, mean in means.items()},
                worst_layer=round(min(per_layer[WINDOWS[-1]]), 4),
            )
        if self.report in ("prometheus", "both"):
            for window, mean in means.items():
                self.gauges[f"eplb_balancedness_{window}"] = mean
            for observer in self.observers:
                observer.on_load(agreed.plan.forward_mode.name.lower(), per_layer[WINDOWS[0]])
