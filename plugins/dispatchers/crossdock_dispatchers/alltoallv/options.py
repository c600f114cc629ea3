"""Options of the ``alltoallv`` dispatcher."""

from __future__ import annotations

import attrs
from crossdock.options import option


@attrs.frozen(kw_only=True)
class AllToAllVOptions:
    """When the exchange of counts is worth its round trip."""

    one_round_bytes: int = option(
        "up to this many bytes received a rank, every row goes to every rank and no counts are exchanged; 0 turns it off",
        default=262144,
        validator=attrs.validators.ge(0),
    )
