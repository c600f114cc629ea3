"""Options of the ``max_len`` padding policy."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class MaxLenOptions:
    """There is nothing to set."""
