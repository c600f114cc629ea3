"""Options of the ``two_batch`` strategy."""

from __future__ import annotations

import attrs

from crossdock_models._shared.overlap_options import OverlapOptions


@attrs.frozen(kw_only=True)
class TwoBatchOptions(OverlapOptions):
    """When a step is cut in two, and where."""
