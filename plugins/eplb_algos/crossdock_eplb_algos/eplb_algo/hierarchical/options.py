"""Options of the planner ``hierarchical``."""

from __future__ import annotations

import attrs
from crossdock.options import option


def _part(_: object, field: attrs.Attribute[float], value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{field.name} must be from 0 to 1, found {value}")


@attrs.frozen(kw_only=True)
class HierarchicalOptions:
    """How strictly groups stay on their node."""

    escape: float = option(
        "part of a layer's slots that may hold experts of another node's groups; 0 keeps every group on its node",
        default=0.0,
        validator=_part,
    )
