"""Numbered start-up phases with their seconds on stderr, and the lines that a person waits for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import attrs


def _now(lines: StartLines) -> float:
    return lines.clock()


@attrs.define(kw_only=True)
class StartLines:
    """Counts phases; nothing here goes to stdout but what the caller prints there."""

    total: int
    clock: Callable[[], float] = time.monotonic
    _done: int = attrs.field(default=0, init=False)
    _last_s: float = attrs.field(init=False, default=attrs.Factory(_now, takes_self=True))

    def done(self, what: str) -> None:
        """A phase has ended."""
        now = self.clock()
        self._done += 1
        say(f"[{self._done}/{self.total}] {what} ({now - self._last_s:.1f} s)")
        self._last_s = now


def say(line: str) -> None:
    """One line on stderr; a closed or full stderr is nobody's reason to end."""
    try:
        print(f"crossdock: {line}", file=sys.stderr, flush=True)
    except OSError:
        return
