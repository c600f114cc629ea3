"""Options of the planner ``global``."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class GlobalOptions:
    """None: the rule leaves nothing to choose."""
