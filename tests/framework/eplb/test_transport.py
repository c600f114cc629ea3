"""Where ranks vote: in shared memory on one machine, else over gloo."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
from crossdock.config import Config, LaunchConfig
from crossdock.eplb.ballot import Vote
from crossdock.eplb.ballot_shared import SharedBallot
from crossdock.eplb.transport import make_ballot, voting_group
from crossdock.errors import RankLost
from crossdock.groups import resolve_sizes
from crossdock.rank_plan import RankPlan
from crossdock.testing.world import RankContext, RankPool

Pool = Callable[[int], RankPool]


def votes(context: RankContext, device: str) -> tuple[str, list[Vote], str]:
    """Kind of the group, everybody's vote, and the reason of the rank that failed."""
    comms = context.comms_of(resolve_sizes(ranks=context.size, attn_dp_size=context.size))
    plan = cast("RankPlan", SimpleNamespace(config=Config(launch=LaunchConfig(device=device))))  # type: ignore[arg-type]
    world = voting_group(plan, comms)
    ballot = make_ballot(world)
    for eplb_pass in range(50):
        mine = Vote.DONE if (eplb_pass + context.rank) % 3 else Vote.BUSY
        found = ballot.cast(mine, eplb_pass)
        told = eplb_pass - 1
        everyone = tuple(Vote.DONE if (told + rank) % 3 else Vote.BUSY for rank in range(context.size))
        assert found == (None if told < 0 else everyone)
    ballot.decided()
    own = Vote.FAILED if context.rank == 1 else Vote.DONE
    assert ballot.cast(own, 50) is None
    found = ballot.cast(own, 51)
    assert found is not None
    return type(world).__name__, list(found), ballot.reason(found, "the disk is full" if context.rank == 1 else "")


@pytest.mark.parametrize(("device", "kind"), [("cpu", "GlooComm"), ("cuda", "SharedComm")])
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_learn_all_votes_and_the_reason(device: str, kind: str, ranks: int, rank_pool: Pool) -> None:
    for found, every_vote, reason in rank_pool(ranks).run(votes, device):
        assert found == kind
        assert every_vote == [Vote.DONE, Vote.FAILED, *[Vote.DONE] * (ranks - 2)]
        assert reason == "rank 1: the disk is full"


def votes_without_rank_1(context: RankContext) -> str:
    """Rank 1 votes once and no more."""
    comms = context.comms_of(resolve_sizes(ranks=context.size, attn_dp_size=context.size))
    ballot = make_ballot(comms.host.world)
    assert isinstance(ballot, SharedBallot)
    ballot.timeout_s = 0.3
    ballot.cast(Vote.BUSY, 0)
    if context.rank == 1:
        return ""
    ballot.cast(Vote.BUSY, 1)
    with pytest.raises(RankLost) as lost:
        ballot.cast(Vote.BUSY, 2)
    return str(lost.value)


def test_a_rank_that_does_not_vote_is_named(rank_pool: Pool) -> None:
    first, _ = rank_pool(2).run(votes_without_rank_1)
    assert "ranks [1] did not vote on moving experts within 0.3 s" in first


def votes_at_other_passes(context: RankContext) -> None:
    comms = context.comms_of(resolve_sizes(ranks=context.size, attn_dp_size=context.size))
    ballot = make_ballot(comms.host.world)
    ballot.cast(Vote.BUSY, context.rank)
    ballot.cast(Vote.BUSY, 1 + context.rank)


def test_votes_of_different_passes_name_the_odd_rank(rank_pool: Pool) -> None:
    with pytest.raises(AssertionError, match=r"ranks \[1\] are at EPLB pass \[1\], the others at 0"):
        rank_pool(2).run(votes_at_other_passes)
