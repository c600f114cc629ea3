"""What the ``fake`` picker can do; no torch."""

from __future__ import annotations

from crossdock.types.location import PickerCapabilities

FAKE_CAPABILITIES = PickerCapabilities(rank_invariant=True, capturable=False)
"""Scores come from a generator, whose state a captured graph would freeze. Ranks that hold the same rows draw the same numbers."""
