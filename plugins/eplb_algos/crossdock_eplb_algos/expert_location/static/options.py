"""Options of the ``static`` picker."""

from __future__ import annotations

import attrs
from crossdock.options import option


@attrs.frozen(kw_only=True)
class StaticOptions:
    """How replicas without a near one are shared out."""

    seed: int = option("seed of the draw for ranks that have no replica near; the same on all ranks", default=42)
