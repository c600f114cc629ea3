"""A buffer of the sum of the counts."""

from __future__ import annotations

import attrs
from crossdock.types.step import PaddingMode, StepCounts


@attrs.frozen
class SumLenPadding:
    """Pads nothing beyond attention TP: fewest rows, collectives of unequal blocks."""

    def choose(self, counts: StepCounts) -> PaddingMode:
        return PaddingMode.SUM_LEN

    def captured_mode(self) -> PaddingMode:
        """The captured buckets of all replicas are equal, so the sum of them is the same buffer."""
        return PaddingMode.SUM_LEN
