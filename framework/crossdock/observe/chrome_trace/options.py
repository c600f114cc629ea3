"""Options of the ``chrome_trace`` observer."""

from __future__ import annotations

import attrs

from crossdock.config import at_least
from crossdock.options import option


@attrs.frozen(kw_only=True)
class ChromeTraceOptions:
    """Where the files go and how long they get."""

    folder: str = option("where the files go; nothing is observed without one", default="")
    most_events: int = option("after so many events nothing more is written", default=1_000_000, validator=at_least(1))
