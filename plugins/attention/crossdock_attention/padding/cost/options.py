"""Options of the ``cost`` padding policy."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class CostOptions:
    """There is nothing to set: the rules need only what a step tells them."""
