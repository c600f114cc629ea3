"""Options of the ``lp`` picker."""

from __future__ import annotations

from typing import Literal

import attrs
from crossdock.options import option


@attrs.frozen(kw_only=True)
class LpOptions:
    """How the split is computed."""

    solver: Literal["auto", "torch"] = option(
        "on the CPU; auto: a C kernel where a compiler is found; torch: torch operators. GPUs have Triton kernels, or torch without Triton",
        default="auto",
    )
