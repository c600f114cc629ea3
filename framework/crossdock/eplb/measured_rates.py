"""What steps and copies took so far, for the forecast of a plan."""

from __future__ import annotations

import attrs

from crossdock.eplb.prediction import Rates
from crossdock.eplb.settings import EplbSettings

_FIRST_COPY_BYTES_PER_S = 2e9
"""Assumed until a switch was timed."""
_KEPT = 0.9
"""Part of the mean that a new duration leaves as it was."""


@attrs.define(eq=False)
class MeasuredRates:
    """Of one rank. Times are those of any one clock, in seconds."""

    settings: EplbSettings
    _step_s: float = attrs.field(default=0.0, init=False)
    _last_end_s: float | None = attrs.field(default=None, init=False)
    _copy_bytes_per_s: float = attrs.field(default=_FIRST_COPY_BYTES_PER_S, init=False)

    def step_ended(self, now_s: float, *, has_rows: bool) -> None:
        """Smoothed duration of steps with rows that follow one another."""
        if has_rows and self._last_end_s is not None:
            taken = now_s - self._last_end_s
            self._step_s = taken if not self._step_s else _KEPT * self._step_s + (1 - _KEPT) * taken

    def next_begins(self, now_s: float, *, has_rows: bool) -> None:
        """``has_rows``: of the step that has ended."""
        self._last_end_s = now_s if has_rows else None

    def copied(self, num_bytes: int, seconds: float) -> None:
        """From spare to live slots."""
        if num_bytes and seconds > 0:
            self._copy_bytes_per_s = num_bytes / seconds

    def rates(self) -> Rates:
        return Rates(
            step_s=self._step_s,
            expert_share=self.settings.expert_share,
            link_bytes_per_s=self.settings.link_gbps * 1e9 / 8,
            copy_bytes_per_s=self._copy_bytes_per_s,
        )
