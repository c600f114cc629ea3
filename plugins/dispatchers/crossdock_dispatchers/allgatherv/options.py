"""Options of the ``allgatherv`` dispatcher."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class AllGatherVOptions:
    """There is nothing to set: the boundary owns the gather and the sum."""
