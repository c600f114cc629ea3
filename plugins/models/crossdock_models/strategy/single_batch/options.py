"""Options of the ``single_batch`` strategy."""

from __future__ import annotations

from typing import Literal

import attrs
from crossdock.options import option


@attrs.frozen(kw_only=True)
class SingleBatchOptions:
    """What the shared experts hide."""

    hides: Literal["dispatch", "combine"] = option(
        "the shared experts run while rows travel to the experts, or while results travel back", default="dispatch"
    )
