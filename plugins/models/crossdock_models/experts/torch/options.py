"""Options of the ``torch`` experts plugin."""

from __future__ import annotations

from typing import Literal

import attrs
from crossdock.options import option


@attrs.frozen(kw_only=True)
class TorchExpertsOptions:
    """Which form of the grouped computation runs."""

    form: Literal["auto", "native", "sorted", "loop"] = option(
        "auto: the fastest that this machine has; native: the C kernel (CPU); sorted: torch's grouped product; "
        "loop: one readable loop over experts",
        default="auto",
    )
