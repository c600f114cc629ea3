"""Whether two micro-batches are faster than one: a trial of pairs of passes, one of either way, next to each other and of about the same size.

Pairs begin with the way that the pair before ended with. Passes of one size that get dearer from step to step, as those of a long prompt do, then
count once for and once against.
"""

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
FEWEST_PAIRS, MOST_PAIRS = 4, 10
"""Of a trial whose pairs differ by less, or contradict each other: the first pass of a way may have loaded kernels. It ends when the median of as
many pairs of either order is twice its own spread, at the latest after ``MOST_PAIRS``."""
CHECK_EVERY = 512
"""After so many steps a verdict is checked by one pair; a pair that contradicts it opens the trial again."""
ORDER = (TrialWay.OVERLAPPED, TrialWay.SEQUENTIAL, TrialWay.SEQUENTIAL, TrialWay.OVERLAPPED)
"""Of two pairs."""
PATIENCE = 64
"""Steps that ask in vain, because such a step never overlaps (its graph was captured whole, or others do not prefill at the same time): no trial stays
open for longer."""


@attrs.frozen
class _Pass:
    """One that waits for its neighbour of the other way."""

    row_s: float
    is_overlapped: bool
    is_timed: bool
    """Operation by operation."""


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
    _half: _Pass | None = attrs.field(default=None, init=False)
    _asks: int = attrs.field(default=0, init=False)
    """Passes of pairs that were asked for."""
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
        self._asks += 1
        return ORDER[(self._asks - 1) % len(ORDER)]

    def learn(self, row_s: float, exposed_share: float | None, *, is_overlapped: bool) -> None:
        """Takes in a pass of so many seconds per row; ``exposed_share`` where its operations were timed. Passes that another replica asked for
        after this one had its verdict teach nothing, or two trials could keep each other open."""
        if self.gain_share is not None and self._steps < CHECK_EVERY:
            return
        if self.is_looking:
            if not is_overlapped:
                self.row_s = row_s
                self._look(exposed_share)
            return
        # Marks of operations cost an overlapped pass twice as much, so passes with them and without are not compared.
        before, now = self._half, _Pass(row_s, is_overlapped=is_overlapped, is_timed=exposed_share is not None)
        self._half = now
        if before is None or before.is_timed != now.is_timed or before.is_overlapped == now.is_overlapped:
            return
        overlapped, sequential = (now, before) if is_overlapped else (before, now)
        self._half, self.row_s = None, sequential.row_s
        self._take(1.0 - overlapped.row_s / sequential.row_s)

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
        is_told = (
            count >= FEWEST_PAIRS and count % 2 == 0 and abs(gain) > max(NOISE, 2.0 * _spread_of_median(self._pairs))
        )
        if is_clear or is_told or count >= MOST_PAIRS:
            self._decide(gain if abs(gain) > NOISE else -NOISE)

    def _decide(self, gain_share: float) -> None:
        self.gain_share, self._steps, self._half = gain_share, 0, None
        # The next pair is a whole one.
        self._asks += self._asks % 2


def _spread_of_median(values: Sequence[float]) -> float:
    """Standard deviation of the median of normally distributed values, from their absolute deviations: one value far out does not matter."""
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return 1.2533 * deviation / math.sqrt(len(values))
