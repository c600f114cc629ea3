"""Options of the ``threshold`` policy."""

from __future__ import annotations

import attrs
from crossdock.options import option


def _part(_: object, field: attrs.Attribute[float], value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{field.name} must be from 0 to 1, found {value}")


@attrs.frozen(kw_only=True)
class ThresholdOptions:
    """When the load is uneven enough."""

    below: float = option(
        "rebalance when balancedness (mean over max load of ranks, 1 is perfect) is below this; 0 never, 1 unless perfect",
        default=0.9,
        validator=_part,
    )
