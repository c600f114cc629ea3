"""Stop strings in a stream of text pieces, across piece boundaries, without giving out any of the stop's text."""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen(kw_only=True)
class Checked:
    """What one piece of text came to."""

    text: str
    """Safe to give out."""
    stop: str | None = None
    """The stop string that ended the sequence."""


@attrs.define(kw_only=True)
class StopMatcher:
    """Keeps back the longest end of the text that could still become a stop string."""

    stops: tuple[str, ...]
    include_stop: bool = False
    _held: str = ""

    def feed(self, piece: str) -> Checked:
        """Text that is safe after ``piece``; of several stops the one that begins first wins, then the one listed first."""
        if not self.stops:
            return Checked(text=piece)
        text = self._held + piece
        found = [(place, order) for order, stop in enumerate(self.stops) if (place := text.find(stop)) >= 0]
        if found:
            place, order = min(found)
            stop = self.stops[order]
            self._held = ""
            return Checked(text=text[: place + len(stop) if self.include_stop else place], stop=stop)
        held = held_length(text, self.stops)
        self._held = text[len(text) - held :]
        return Checked(text=text[: len(text) - held])

    def flush(self) -> str:
        """What was kept back, when the sequence ends without a stop."""
        held, self._held = self._held, ""
        return held


def held_length(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that begins a stop string."""
    longest = min(len(text), max(len(stop) for stop in stops) - 1)
    return next((size for size in range(longest, 0, -1) if any(stop.startswith(text[-size:]) for stop in stops)), 0)
