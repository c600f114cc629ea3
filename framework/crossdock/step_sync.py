"""How the ranks of a run agree on each step: records between leaders, then one message from each leader to its attention-TP peers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from crossdock.comm import RankComms
from crossdock.engine_seams import AgreedStep, StepSync
from crossdock.errors import MisuseError
from crossdock.rank_plan import RankPlan
from crossdock.step import StepRules, decide_step
from crossdock.types.step import StepRecord


@attrs.frozen(kw_only=True, eq=False)
class OneRankSync:
    """A job of one rank agrees with itself."""

    rules: StepRules

    def agree(self, record: StepRecord) -> AgreedStep:
        return AgreedStep(plan=decide_step((record,), self.rules), records=(record,))

    def tell_peers(self, agreed: AgreedStep, message: bytes) -> None:
        """There are none."""

    def follow(self, step: int, eplb_pass: int) -> tuple[AgreedStep, bytes]:
        raise MisuseError("the only rank of a job leads; there is nobody to follow")

    def abort(self, message: str) -> None:
        """Nobody waits."""


@contextmanager
def open_step_sync(plan: RankPlan, rules: StepRules, comms: RankComms, *, run_id: str) -> Iterator[StepSync]:
    """The sync of this rank; closed when the block is left. Collective."""
    yield OneRankSync(rules=rules)
