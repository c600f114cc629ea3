"""Options of the ``sequential`` strategy."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class SequentialOptions:
    """There are none."""
