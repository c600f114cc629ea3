"""Options of the ``priced`` policy."""

from __future__ import annotations

import attrs
from crossdock.options import option


def _not_negative(_: object, field: attrs.Attribute[float], value: float) -> None:
    if not 0 <= value < float("inf"):
        raise ValueError(f"{field.name} must not be negative, found {value}")


@attrs.frozen(kw_only=True)
class PricedOptions:
    """How much better than its price a plan must be."""

    margin: float = option(
        "rebalance when the gain is more than this many prices; above 1 asks for a profit",
        default=1.0,
        validator=_not_negative,
    )
    min_gain_s: float = option(
        "and more than so many seconds until the next decision", default=0.0, validator=_not_negative
    )
