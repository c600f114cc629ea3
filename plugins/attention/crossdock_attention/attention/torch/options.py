"""Options of the ``torch`` attention backend."""

from __future__ import annotations

from typing import Literal

import attrs
from crossdock.options import option


@attrs.frozen(kw_only=True)
class TorchAttentionOptions:
    """How decode rows and chunks are attended; results differ by rounding only."""

    decode: Literal["auto", "gather"] = option(
        "auto: a C kernel reads decode rows' pages in place where there is a compiler; gather: torch operators always.",
        default="auto",
    )
    padding_share: float = option(
        "Largest share of gathered decode rows that may be padding before sequences are attended in groups of similar length.",
        default=0.33,
        validator=attrs.validators.and_(attrs.validators.ge(0.0), attrs.validators.lt(1.0)),
    )
    block_rows: int = option(
        "Query rows of a chunk with a prefix that are attended at once; bounds the mask.",
        default=512,
        validator=attrs.validators.ge(1),
    )
    rows: Literal["together", "alone"] = option(
        "alone: each row is attended by itself, so that its bits do not depend on the rows of its step, as launch.row_invariant has it; slow without a C kernel",
        default="together",
    )
