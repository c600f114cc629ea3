"""Options of the ``locality`` picker."""

from __future__ import annotations

from typing import Literal

import attrs
from crossdock.options import option


def _not_negative(_: object, field: attrs.Attribute[float], value: float) -> None:
    if not 0 <= value < float("inf"):
        raise ValueError(f"{field.name} must not be negative, found {value}")


@attrs.frozen(kw_only=True)
class LocalityOptions:
    """Prices, in units of one token computed by one expert."""

    link_cost: float = option(
        "what a token costs that goes to another rank of the same machine", default=0.05, validator=_not_negative
    )
    node_cost: float = option("what a token costs that goes to another machine", default=0.5, validator=_not_negative)
    solver: Literal["auto", "torch"] = option(
        "on the CPU; auto: a C kernel where a compiler is found; torch: torch operators. GPUs have Triton kernels, or torch without Triton",
        default="auto",
    )
