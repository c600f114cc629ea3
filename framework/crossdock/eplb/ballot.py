"""How ranks learn, between two steps, whether all of them are done, or one failed. One small collective a vote."""

from __future__ import annotations

import enum

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


@attrs.frozen(kw_only=True, eq=False)
class Ballot:
    """Votes of all ranks, host tensors only."""

    world: GroupComm

    def cast(self, vote: Vote, eplb_pass: int) -> tuple[Vote, ...]:
        """Everybody's vote, in rank order; every rank calls it after the same step.

        Raises:
            AgreementError: ranks are at different passes; the odd ones are named.
        """
        table = self.world.all_gather(torch.tensor([[int(vote), eplb_pass]], dtype=torch.int64)).tolist()
        passes = [row[1] for row in table]
        if len(set(passes)) > 1:
            usual = max(set(passes), key=passes.count)
            odd = [self.world.ranks[index] for index, found in enumerate(passes) if found != usual]
            raise AgreementError(
                f"ranks {odd} are at EPLB pass {[found for found in passes if found != usual]}, the others at {usual}",
                odd_ranks=odd,
                field="eplb_pass",
            )
        return tuple(Vote(row[0]) for row in table)

    def reason(self, votes: tuple[Vote, ...], own: str) -> str:
        """Why the work is given up, in the words of the first rank that failed (``own`` on that rank). A collective."""
        culprit = next(index for index, vote in enumerate(votes) if vote in (Vote.FAILED, Vote.LATE))
        message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        words = own.encode()[:_MESSAGE_BYTES]
        message[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8) if words else 0
        told = bytes(self.world.broadcast(message, culprit).tolist()).rstrip(b"\0").decode(errors="replace")
        return f"rank {self.world.ranks[culprit]}: {told}"
