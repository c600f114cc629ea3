"""Votes in shared memory, read one step later: by then all ranks have voted, so that none waits for another."""

from __future__ import annotations

import os

import attrs
import numpy as np
import numpy.typing as npt

from crossdock.comm_shared import DEFAULT_TIMEOUT_S, LINE_INTS
from crossdock.eplb.ballot import Vote, agreed_votes, told_reason
from crossdock.errors import RankLost
from crossdock.shared_memory import Processes, Watch
from crossdock.types.comm import GroupComm

ROUNDS = 8
"""A rank that reads vote n - 2 has cast n - 1, which lets others go on to n + 2: the first vote on a question waits for nobody. More than 4."""
_NUMBER, _VOTE, _PASS = range(3)


def board_bytes(num_ranks: int) -> int:
    """Shared memory of a board: a cache line for each rank and round, and one for each rank's pid."""
    return 8 * LINE_INTS * num_ranks * (ROUNDS + 1)


@attrs.define(kw_only=True, eq=False)
class SharedBallot:
    """``Ballot`` over zeroed shared memory of ``board_bytes``."""

    world: GroupComm
    """For words, host tensors only."""
    memory: npt.NDArray[np.uint8]
    timeout_s: float = DEFAULT_TIMEOUT_S
    _rounds: npt.NDArray[np.int64] = attrs.field(init=False)
    """[ROUNDS, ranks, LINE_INTS]: number of the vote, what it is, and the pass."""
    _pids: npt.NDArray[np.int64] = attrs.field(init=False)
    _number: int = attrs.field(default=0, init=False)
    _is_open: bool = attrs.field(default=False, init=False)
    """The vote before belongs to the question that is asked now."""
    _processes: Processes | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        size = self.world.size
        lines = self.memory.view(np.int64).reshape(ROUNDS + 1, size, LINE_INTS)
        self._rounds, self._pids = lines[:ROUNDS], lines[ROUNDS, :, 0]
        self._pids[self.world.rank] = os.getpid()

    def cast(self, vote: Vote, eplb_pass: int) -> tuple[Vote, ...] | None:
        """As ``Ballot.cast``, but the votes that come back are those of the call before; None from the first one on a question."""
        self._number += 1
        line = self._rounds[self._number % ROUNDS, self.world.rank]
        line[_VOTE], line[_PASS] = int(vote), eplb_pass
        # Last: who sees the number sees the rest (stores are seen in order where memory is shared at all).
        line[_NUMBER] = self._number
        was_open, self._is_open = self._is_open, True
        return self._votes(self._number - 1) if was_open else None

    def decided(self) -> None:
        """The next vote is on another question. Every rank calls it after the same vote."""
        self._is_open = False

    def reason(self, votes: tuple[Vote, ...], own: str) -> str:
        """As ``Ballot.reason``."""
        return told_reason(self.world, votes, own)

    def _votes(self, number: int) -> tuple[Vote, ...]:
        table = self._rounds[number % ROUNDS]
        try:
            Watch(timeout_s=self.timeout_s, check=self._check).until(lambda: bool((table[:, _NUMBER] == number).all()))
        except TimeoutError:
            absent = [self.world.ranks[index] for index in np.flatnonzero(table[:, _NUMBER] != number)]
            raise RankLost(
                f"ranks {absent} did not vote on moving experts within {self.timeout_s:g} s; see their logs",
                rank=absent[0] if len(absent) == 1 else None,
            ) from None
        return agreed_votes(table[:, [_VOTE, _PASS]].tolist(), self.world.ranks)

    def _check(self) -> None:
        if self._processes is None and self._pids.all():
            self._processes = Processes.of(self._pids.tolist(), self.world.ranks)
        if self._processes is not None:
            self._processes.check()
