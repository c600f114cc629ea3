"""How the ranks come to agree on a step: leaders exchange records and decide, then each tells its attention-TP peers in one message."""

from __future__ import annotations

import zlib
from collections import Counter

import attrs
import msgspec
import torch

from crossdock.engine_seams import AgreedStep
from crossdock.errors import AgreementError, ExchangeTimeout, MisuseError
from crossdock.exchange import AbortNotice, StepExchange
from crossdock.peer_channel import PeerChannel
from crossdock.step import StepRules, decide_step
from crossdock.types.comm import GroupComm
from crossdock.types.step import StepPlan, StepRecord

PLAN_FIELDS = tuple(field.name for field in attrs.fields(StepPlan))


@attrs.frozen(kw_only=True)
class PeerStep:
    """What a leader tells its peers."""

    step: int
    eplb_pass: int
    plan: StepPlan
    records: tuple[StepRecord, ...]
    message: bytes
    """Belongs to the engine."""


@attrs.define(kw_only=True, eq=False)
class RankSync:
    """The ``StepSync`` of a rank of a job of several."""

    rules: StepRules
    exchange: StepExchange | None
    """None on a peer."""
    peers: PeerChannel | None
    """None without attention TP."""
    notice: AbortNotice | None = None
    proof_group: GroupComm | None = None
    """All ranks, when every step is to prove that they hold the same plan."""
    _carried_s: float = attrs.field(default=0.0, init=False)

    def agree(self, record: StepRecord) -> AgreedStep:
        """Exchanges records between leaders and decides the plan.

        Raises:
            ExchangeTimeout: replicas did not arrive; names their ranks.
            AgreementError: replicas are at different steps or passes.
            RankLost: somebody called for a stop.
        """
        if self.exchange is None:
            raise MisuseError("only a replica's leader exchanges records; a peer follows its leader")
        records = self.exchange.exchange(record)
        plan = decide_step(records, self.rules)
        return AgreedStep(plan=plan, records=records, wait_s=self._wait_s(plan))

    def tell_peers(self, agreed: AgreedStep, message: bytes) -> None:
        """Hands plan, records and ``message`` to the attention-TP peers."""
        plan = agreed.plan
        if self.peers is not None:
            told = PeerStep(
                step=plan.step, eplb_pass=plan.eplb_pass, plan=plan, records=agreed.records, message=message
            )
            self.peers.send(msgspec.msgpack.encode(told))
        self._prove(plan)

    def follow(self, step: int, eplb_pass: int) -> tuple[AgreedStep, bytes]:
        """A peer's side of ``tell_peers``.

        Raises:
            AgreementError: the leader is at another step or pass.
            ExchangeTimeout: the leader sent nothing in time.
            RankLost: the leader has ended, or somebody called for a stop.
        """
        if self.peers is None:
            raise MisuseError("there is no leader to follow without attention TP")
        leader = self.peers.leader
        try:
            told = msgspec.msgpack.decode(self.peers.receive(), type=PeerStep)
        except TimeoutError:
            raise ExchangeTimeout(
                f"step {step}: rank {leader}, the leader of this replica, sent no step within {self.peers.timeout_s:g} s; "
                "look at its log",
                missing_ranks=[leader],
            ) from None
        if (told.step, told.eplb_pass) != (step, eplb_pass):
            raise AgreementError(
                f"leader rank {leader} is at step {told.step}, pass {told.eplb_pass}; this peer is at step {step}, pass "
                f"{eplb_pass}: one of them left the common step loop",
                odd_ranks=[leader],
                field="step" if told.step != step else "eplb_pass",
            )
        self._prove(told.plan)
        return AgreedStep(plan=told.plan, records=told.records), told.message

    def abort(self, message: str) -> None:
        """Tells the ranks that wait for this one that it will not come."""
        if self.exchange is not None:
            self.exchange.abort(message)
        elif self.notice is not None:
            self.notice.write(message)

    def _wait_s(self, plan: StepPlan) -> float:
        """The wait of this exchange and of those before it that gave no batch; a park forgets them."""
        assert self.exchange is not None
        self._carried_s += self.exchange.waited_s
        if not max(plan.live_tokens):
            if plan.park:
                self._carried_s = 0.0
            return 0.0
        wait_s, self._carried_s = self._carried_s, 0.0
        return wait_s

    def _prove(self, plan: StepPlan) -> None:
        if self.proof_group is not None:
            prove_same_plan(plan, self.proof_group)


def prove_same_plan(plan: StepPlan, world: GroupComm) -> None:
    """Compares a digest of every field of the plan over all ranks; for debugging, one more collective a step.

    Raises:
        AgreementError: on every rank; names the ranks that differ from the majority and the first field.
    """
    digests = [zlib.crc32(repr(getattr(plan, name)).encode()) for name in PLAN_FIELDS]
    table = world.all_gather(torch.tensor([digests], dtype=torch.int64))
    for number, name in enumerate(PLAN_FIELDS):
        column = [int(digest) for digest in table[:, number]]
        common, _ = Counter(column).most_common(1)[0]
        odd = [world.ranks[index] for index, digest in enumerate(column) if digest != common]
        if odd:
            raise AgreementError(
                f"step {plan.step}: ranks {odd} decided another {name} than the others; this rank has "
                f"{getattr(plan, name)!r}",
                odd_ranks=odd,
                field=name,
            )
