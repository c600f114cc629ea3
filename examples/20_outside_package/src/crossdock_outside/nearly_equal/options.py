"""Options of ``nearly_equal``."""

from __future__ import annotations

import attrs
from crossdock.config import at_least
from crossdock.options import option


@attrs.frozen(kw_only=True)
class NearlyEqualOptions:
    tolerance: float = option("how far the largest replica may be above the mean", default=0.1, validator=at_least(0.0))
