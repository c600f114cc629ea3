"""Options of the planner ``crossdock``."""

from __future__ import annotations

from typing import Literal

import attrs
from crossdock.options import option

from crossdock_eplb_algos._shared.balance import EffortName
from crossdock_eplb_algos._shared.forecast import ForecastName


def _part(_: object, field: attrs.Attribute[float], value: float | None) -> None:
    if value is not None and not 0 <= value <= 1:
        raise ValueError(f"{field.name} must be from 0 to 1, found {value}")


def _not_negative(_: object, field: attrs.Attribute[float], value: float | None) -> None:
    if value is not None and not 0 <= value < float("inf"):
        raise ValueError(f"{field.name} must not be negative, found {value}")


@attrs.frozen(kw_only=True)
class CrossdockOptions:
    """What to plan for and what a plan may cost."""

    effort: EffortName = option(
        "planning time: fast (one deal and two rounds of exchanges), default, or high (ten times the default)",
        default="default",
    )
    split: Literal["even", "batch"] = option(
        "how replicas share the tokens of their expert; even: alike; batch: anew for each batch, as the pickers lp and locality do, so that"
        " copies should link all GPUs with each other",
        default="even",
    )
    forecast: ForecastName = option(
        "how steps of a load become the load planned for: sum, last, mean, ewma, margin (ewma plus a spread) or auto"
        " (margin with the decay that would have predicted best)",
        default="sum",
    )
    decay: float = option("weight of the newest step in ewma and margin", default=0.3, validator=_part)
    margin: float = option("standard deviations added by margin and auto", default=0.5, validator=_not_negative)
    slack: float | None = option(
        "with a current placement: stop moving experts of a layer when its fullest GPU is within this part of what a fresh"
        " plan reaches; 0 plans afresh and renames GPUs; absent: 0.011 with 8 slots a GPU or more, 0.015 with fewer, which take more moves",
        default=None,
        validator=_not_negative,
    )
    max_moves: int | None = option(
        "with a current placement: most replicas of a layer that may be loaded to another GPU",
        default=None,
        validator=_not_negative,
    )
    move_price: float = option(
        "with a current placement: what one moved replica must win, as a part of a GPU's mean load",
        default=0.0,
        validator=_not_negative,
    )
    outside: float | None = option(
        "keep expert groups on nodes, but for this part of a layer's slots; absent: nodes play no part",
        default=None,
        validator=_part,
    )

    def __attrs_post_init__(self) -> None:
        if self.outside is not None and (self.max_moves is not None or self.move_price):
            raise ValueError("outside cannot be combined with max_moves or move_price")
