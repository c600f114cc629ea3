"""Where ranks vote: over gloo on processors, in shared memory beside GPUs; both count the same."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
from crossdock.config import Config, LaunchConfig
from crossdock.eplb.ballot import Ballot, Vote
from crossdock.eplb.transport import voting_group
from crossdock.groups import resolve_sizes
from crossdock.rank_plan import RankPlan
from crossdock.testing.world import RankContext, RankPool

Pool = Callable[[int], RankPool]


def votes(context: RankContext, device: str) -> tuple[str, list[Vote], str]:
    """Kind of the group, everybody's vote, and the reason of the rank that failed."""
    comms = context.comms_of(resolve_sizes(ranks=context.size, attn_dp_size=context.size))
    plan = cast("RankPlan", SimpleNamespace(config=Config(launch=LaunchConfig(device=device))))  # type: ignore[arg-type]
    world = voting_group(plan, comms)
    ballot = Ballot(world=world)
    for eplb_pass in range(20):
        assert ballot.cast(Vote.BUSY, eplb_pass) == (Vote.BUSY,) * context.size
    found = ballot.cast(Vote.FAILED if context.rank == 1 else Vote.DONE, 20)
    return type(world).__name__, list(found), ballot.reason(found, "the disk is full" if context.rank == 1 else "")


@pytest.mark.parametrize(("device", "kind"), [("cpu", "GlooComm"), ("cuda", "SharedComm")])
def test_all_ranks_learn_all_votes_and_the_reason(device: str, kind: str, rank_pool: Pool) -> None:
    for found, every_vote, reason in rank_pool(2).run(votes, device):
        assert found == kind
        assert every_vote == [Vote.DONE, Vote.FAILED]
        assert reason == "rank 1: the disk is full"
