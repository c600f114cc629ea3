"""How ranks learn, between two steps, whether all of them are done, or one failed. One small collective a vote."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import attrs
import torch

from crossdock.errors import AgreementError
from crossdock.types.comm import GroupComm

_MESSAGE_BYTES = 400


class Vote(enum.IntEnum):
    """What a rank says about its part of the work."""

    BUSY = 0
    DONE = 1
    FAILED = 2
    LATE = 3


class Ballot(Protocol):
    """How ranks vote. All call the same methods after the same steps."""

    def cast(self, vote: Vote, eplb_pass: int) -> tuple[Vote, ...] | None:
        """This rank's vote; everybody's, in rank order, where they are known: the same answer on every rank.

        Raises:
            AgreementError: ranks are at different passes; the odd ones are named.
        """
        ...

    def decided(self) -> None:
        """The next vote is on another question."""
        ...

    def reason(self, votes: tuple[Vote, ...], own: str) -> str:
        """Why the work is given up, in the words of the first rank that failed (``own`` on that rank). A collective."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class GatheredBallot:
    """Votes of all ranks by a collective, known at once."""

    world: GroupComm
    """For host tensors."""

    def cast(self, vote: Vote, eplb_pass: int) -> tuple[Vote, ...]:
        table = self.world.all_gather(torch.tensor([[int(vote), eplb_pass]], dtype=torch.int64)).tolist()
        return agreed_votes(table, self.world.ranks)

    def decided(self) -> None:
        """Every vote stands for itself."""

    def reason(self, votes: tuple[Vote, ...], own: str) -> str:
        return told_reason(self.world, votes, own)


def agreed_votes(table: Sequence[Sequence[int]], ranks: Sequence[int]) -> tuple[Vote, ...]:
    """Votes from (vote, pass) of each of ``ranks``.

    Raises:
        AgreementError: passes differ.
    """
    passes = [row[1] for row in table]
    if len(set(passes)) > 1:
        usual = max(set(passes), key=passes.count)
        odd = [ranks[index] for index, found in enumerate(passes) if found != usual]
        raise AgreementError(
            f"ranks {odd} are at EPLB pass {[found for found in passes if found != usual]}, the others at {usual}",
            odd_ranks=odd,
            field="eplb_pass",
        )
    return tuple(Vote(row[0]) for row in table)


def told_reason(world: GroupComm, votes: tuple[Vote, ...], own: str) -> str:
    """``Ballot.reason`` over host tensors."""
    culprit = next(index for index, vote in enumerate(votes) if vote in (Vote.FAILED, Vote.LATE))
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    words = own.encode()[:_MESSAGE_BYTES]
    message[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8) if words else 0
    told = bytes(world.broadcast(message, culprit).tolist()).rstrip(b"\0").decode(errors="replace")
    return f"rank {world.ranks[culprit]}: {told}"
