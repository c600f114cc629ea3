"""Options of the ``triton`` attention backend: none; an unknown key is an error all the same."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class TritonAttentionOptions:
    """Nothing to choose: blocks and splits follow from sizes."""
