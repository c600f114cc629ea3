"""Options of the ``fake`` picker."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class FakeOptions:
    """There is nothing to set."""
