"""What the ``static`` picker can do; no torch."""

from __future__ import annotations

from crossdock.types.location import PickerCapabilities

STATIC_CAPABILITIES = PickerCapabilities(rank_invariant=False)
"""Ranks prefer different replicas by design, so it needs a dispatcher whose ranks hold different rows."""
