"""Padding policies: how the row counts of all replicas become one buffer (DESIGN section 6; the facts, section 2)."""

from __future__ import annotations

from typing import Protocol

from crossdock.types.step import PaddingMode, StepCounts


class PaddingPolicy(Protocol):
    """Pure: the same counts give the same answer on each rank, with no state in between."""

    def choose(self, counts: StepCounts) -> PaddingMode:
        """The padding mode of an eager step."""
        ...

    def captured_mode(self) -> PaddingMode:
        """The padding mode of every captured step; slots lie at equal distances in a captured buffer."""
        ...
