"""Options of the ``torch`` experts plugin."""

from __future__ import annotations

from typing import Literal

import attrs
from crossdock.options import option


@attrs.frozen(kw_only=True)
class TorchExpertsOptions:
    """Which path runs the experts."""

    path: Literal["auto", "reference"] = option(
        "auto: the fastest that this machine has; reference: one readable loop over experts", default="auto"
    )
