"""What the ``lp`` picker can do; no torch."""

from __future__ import annotations

from crossdock.types.location import PickerCapabilities

LP_CAPABILITIES = PickerCapabilities(rank_invariant=True, collective_per_layer=True)
"""Ranks that hold the same rows compute the same split of them."""
