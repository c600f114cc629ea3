"""Options of the ``triton`` experts plugin: none yet; an unknown key is an error all the same."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class TritonExpertsOptions:
    """Nothing to choose: tiles come from a committed table."""
