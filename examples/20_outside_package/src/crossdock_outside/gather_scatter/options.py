"""Options of ``gather_scatter``."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class GatherScatterOptions:
    """There is nothing to set."""
