"""Options of the ``interval`` policy."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class IntervalOptions:
    """There is nothing to set: ``[eplb] interval`` says how many recorded passes lie between two decisions."""
