"""Options of the ``dynamic`` picker."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class DynamicOptions:
    """There is nothing to set."""
