"""What the ``locality`` picker can do; no torch."""

from __future__ import annotations

from crossdock.types.location import PickerCapabilities

LOCALITY_CAPABILITIES = PickerCapabilities(rank_invariant=True, collective_per_layer=True)
"""Ranks that hold the same rows send nothing, so their split is that of the least largest load, the same on all of them."""
