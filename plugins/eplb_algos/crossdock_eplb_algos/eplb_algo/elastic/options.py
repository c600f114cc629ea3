"""Options of the planner ``elastic``."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class ElasticOptions:
    """None: the rule leaves nothing to choose."""
