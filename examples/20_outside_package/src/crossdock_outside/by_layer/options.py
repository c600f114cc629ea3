"""Options of ``by_layer``."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class ByLayerOptions:
    """There is nothing to set."""
