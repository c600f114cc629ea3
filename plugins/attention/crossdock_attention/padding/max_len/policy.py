"""Equal blocks for every replica."""

from __future__ import annotations

import attrs
from crossdock.types.step import PaddingMode, StepCounts


@attrs.frozen
class MaxLenPadding:
    """Pads every replica to the largest count: equal-block collectives, most rows."""

    def choose(self, counts: StepCounts) -> PaddingMode:
        return PaddingMode.MAX_LEN

    def captured_mode(self) -> PaddingMode:
        return PaddingMode.MAX_LEN
