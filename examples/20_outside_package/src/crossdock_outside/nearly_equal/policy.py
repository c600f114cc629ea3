"""The padding policy."""

from __future__ import annotations

from crossdock.types.step import PaddingMode, StepCounts

from crossdock_outside.nearly_equal.options import NearlyEqualOptions


class NearlyEqual:
    """Equal blocks cost at most ``tolerance`` of padding, and let the equal-block collectives run."""

    def __init__(self, options: NearlyEqualOptions) -> None:
        self._tolerance = options.tolerance

    def choose(self, counts: StepCounts) -> PaddingMode:
        if counts.symmetric_counts_required:
            return PaddingMode.MAX_LEN
        mean = sum(counts.tokens) / len(counts.tokens)
        is_nearly_equal = max(counts.tokens) <= mean * (1 + self._tolerance)
        return PaddingMode.MAX_LEN if is_nearly_equal else PaddingMode.SUM_LEN

    def captured_mode(self) -> PaddingMode:
        return PaddingMode.MAX_LEN
