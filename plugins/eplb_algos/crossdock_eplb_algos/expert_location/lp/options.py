"""Options of the ``lp`` picker."""

from __future__ import annotations

from typing import Literal

import attrs
from crossdock.options import option


@attrs.frozen(kw_only=True)
class LpOptions:
    """How the split is computed."""

    solver: Literal["auto", "torch"] = option(
        "auto: a C kernel on the CPU where a compiler is found; torch: torch operators everywhere", default="auto"
    )
