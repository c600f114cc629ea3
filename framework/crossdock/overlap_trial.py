"""Whether two micro-batches are faster than one: a trial of pairs of passes, one of either way, next to each other and of about the same size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import attrs

from crossdock.types.step import TrialWay

LOOKS = 2
"""Sequential passes whose operations are timed before anything is tried. Timing costs the host time, so they are compared with nothing."""
PRICE = 0.03
"""Share of the computing time that two half batches cost more than a whole one, at the least (7 % was seen with 16,384 tokens, 15 % with 4,096, on two
H200s): where less communication than that is exposed, overlap is not even tried."""
CLEAR = 0.05
"""Two pairs that both differ by more than this share, in the same direction, are enough."""
NOISE = 0.01
"""Gains below this share are none, and differences below it change no verdict."""
FEWEST_PAIRS, MOST_PAIRS = 3, 9
"""Of a trial whose pairs differ by less, or contradict each other: the first pass of a way may have loaded kernels. It ends when the median is
twice its own spread, at the latest after ``MOST_PAIRS``."""
CHECK_EVERY = 512
"""After so many steps a verdict is checked by one pair; a pair that contradicts it opens the trial again."""
PATIENCE = 64
"""Steps that ask in vain, because such a step never overlaps (its graph was captured whole, or others do not prefill at the same time): no trial stays
open for longer."""


@attrs.define
class OverlapTrial:
    """Of steps of one mode and size. The same calls on two ranks ask for the same passes."""

    gain_share: float | None = attrs.field(default=None, init=False)
    """Share of a sequential pass that overlap saves, negative where it costs; None while that is open."""
    row_s: float = attrs.field(default=0.0, init=False)
    """Seconds per row of the last sequential pass that was taken in."""
    _looks: list[float | None] = attrs.field(factory=list["float | None"], init=False)
    """Exposed share of communication of the first passes; None where operations were not timed, as in a replayed graph."""
    _pairs: list[float] = attrs.field(factory=list[float], init=False)
    _half: tuple[float, bool] | None = attrs.field(default=None, init=False)
    """The overlapped pass of a pair that waits for its sequential one: seconds per row, and whether its operations were timed."""
    _asked: TrialWay = attrs.field(default=TrialWay.NONE, init=False)
    _steps: int = attrs.field(default=0, init=False)
    """Since the verdict."""

    @property
    def is_looking(self) -> bool:
        """The next sequential pass is one whose operations are to be timed."""
        return self.gain_share is None and len(self._looks) < LOOKS

    def ask(self) -> TrialWay:
        """How the next step is to run; ``NONE`` to follow the verdict."""
        if self.is_looking:
            return TrialWay.SEQUENTIAL
        self._steps += 1
        asks = self._steps - (0 if self.gain_share is None else CHECK_EVERY)
        if asks > PATIENCE:
            self._decide(-NOISE if self.gain_share is None else self.gain_share)
        if self._steps < CHECK_EVERY and self.gain_share is not None:
            return TrialWay.NONE
        is_half = self._asked is TrialWay.OVERLAPPED
        self._asked = TrialWay.SEQUENTIAL if is_half else TrialWay.OVERLAPPED
        return self._asked

    def learn(self, row_s: float, exposed_share: float | None, *, is_overlapped: bool) -> None:
        """Takes in a pass of so many seconds per row; ``exposed_share`` where its operations were timed. Passes that another replica asked for
        after this one had its verdict teach nothing, or two trials could keep each other open."""
        if self.gain_share is not None and self._steps < CHECK_EVERY:
            return
        if is_overlapped:
            self._half = (row_s, exposed_share is not None)
            return
        if self.is_looking:
            self.row_s = row_s
            self._look(exposed_share)
            return
        # Marks of operations cost an overlapped pass twice as much, so passes with them and without are not compared.
        if self._half is not None and self._half[1] == (exposed_share is not None):
            self.row_s = row_s
            self._take(1.0 - self._half[0] / row_s)
        self._half = None

    def _look(self, exposed_share: float | None) -> None:
        self._looks.append(exposed_share)
        timed = [share for share in self._looks if share is not None]
        if self.is_looking or not timed:
            return
        most = min(timed) - PRICE * (1.0 - min(timed))
        if most < 0:
            self._decide(most)

    def _take(self, pair: float) -> None:
        """``pair``: share of the sequential pass that the overlapped one beside it saved."""
        if self.gain_share is not None:
            stands = abs(pair) <= NOISE or (pair > 0) == (self.gain_share > 0)
            self._pairs, self._steps = [pair], 0
            self.gain_share = self.gain_share if stands else None
            return
        self._pairs.append(pair)
        gain, count = statistics.median(self._pairs), len(self._pairs)
        is_clear = count > 1 and (min(self._pairs) > CLEAR or max(self._pairs) < -CLEAR)
        is_told = count >= FEWEST_PAIRS and abs(gain) > max(NOISE, 2.0 * _spread_of_median(self._pairs))
        if is_clear or is_told or count >= MOST_PAIRS:
            self._decide(gain if abs(gain) > NOISE else -NOISE)

    def _decide(self, gain_share: float) -> None:
        self.gain_share, self._steps, self._asked, self._half = gain_share, 0, TrialWay.NONE, None


def _spread_of_median(values: Sequence[float]) -> float:
    """Standard deviation of the median of normally distributed values, from their absolute deviations: one value far out does not matter."""
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return 1.2533 * deviation / math.sqrt(len(values))
