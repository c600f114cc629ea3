"""Options of the ``sum_len`` padding policy."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class SumLenOptions:
    """There is nothing to set."""
