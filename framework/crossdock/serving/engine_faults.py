"""What ranks said before they ended, and which of it is the cause."""

from __future__ import annotations

import asyncio

import attrs

from crossdock.errors import UsageError
from crossdock.types.link import Fatal


@attrs.define(eq=False)
class EngineFaults:
    """Reports of ranks that end, and the first reason that made the engine fail."""

    fatals: list[Fatal] = attrs.Factory(list[Fatal])
    failure: str | None = None
    """Why nothing is taken any more; None while the engine works."""
    _failed: asyncio.Event = attrs.Factory(asyncio.Event)

    @property
    def cause(self) -> str | None:
        """Why the engine failed, as far as ranks said it; None when none did.

        When one rank dies the others fail in their collectives and may report first, so a report about the culprit itself
        goes before one that names another rank, and that before one that names nobody.
        """
        if not self.fatals:
            return None
        best = min(self.fatals, key=_distance_to_cause)
        named = best.culprit_rank not in (None, best.rank)
        return f"rank {best.rank}: {best.message}" + (f" (rank {best.culprit_rank} is the cause)" if named else "")

    @property
    def has_wrong_input(self) -> bool:
        """A rank ended because of configuration or checkpoint, which the user can correct."""
        return any(fatal.exit_code == UsageError.exit_code for fatal in self.fatals)

    async def wait(self) -> None:
        """Until the engine has failed."""
        await self._failed.wait()

    def fail(self, reason: str) -> bool:
        """Takes the first reason; False for a later one."""
        if self.failure is not None:
            return False
        self.failure = reason
        self._failed.set()
        return True


def _distance_to_cause(fatal: Fatal) -> int:
    if fatal.culprit_rank is None:
        return 2
    return 0 if fatal.culprit_rank == fatal.rank else 1
