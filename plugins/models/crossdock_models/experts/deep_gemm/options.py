"""Options of the ``deep_gemm`` experts plugin."""

from __future__ import annotations

import attrs
from crossdock.options import option


@attrs.frozen(kw_only=True)
class DeepGemmOptions:
    """Which form of the grouped product runs."""

    masked_rows: int = option(
        "up to so many received rows, each expert gets places for all of them (masked product); above, rows lie in aligned segments",
        default=256,
        validator=attrs.validators.ge(0),
    )
