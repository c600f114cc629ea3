"""Options of the ``torch`` attention backend."""

from __future__ import annotations

import attrs
from crossdock.options import option


@attrs.frozen(kw_only=True)
class TorchAttentionOptions:
    """Trade-offs of gathering; the result does not depend on them beyond rounding."""

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
