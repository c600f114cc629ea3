"""What the ``dynamic`` picker can do; no torch."""

from __future__ import annotations

from crossdock.types.location import PickerCapabilities

DYNAMIC_CAPABILITIES = PickerCapabilities(rank_invariant=True)
"""Where ranks hold the same rows the pick depends on the row only; where they do not, it may differ and nobody minds."""
