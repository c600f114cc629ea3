"""What the step loop needs from others: agreement of the ranks, a runner of batches, and objects that act between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs
import msgspec

from crossdock.scheduled import Scheduled, StepTokens
from crossdock.step_work import StepWork
from crossdock.types.link import Control
from crossdock.types.step import StepPlan, StepRecord

if TYPE_CHECKING:
    import torch

    from crossdock.batch_build import HostBatch
    from crossdock.choose_tokens import StepChoice


@attrs.frozen(kw_only=True)
class AgreedStep:
    """What every rank knows of a step once the records were exchanged."""

    plan: StepPlan
    records: tuple[StepRecord, ...]
    """One a replica, in replica order."""
    wait_s: float = 0.0
    """How long this rank waited for the others, with what was carried over from steps without a batch."""

    @property
    def everybody_stops(self) -> bool:
        return all(record.stop for record in self.records)

    @property
    def has_rows(self) -> bool:
        """Some replica computes, so all of them do."""
        return max(self.plan.live_tokens) > 0

    @property
    def is_counted(self) -> bool:
        """The step belongs in load statistics: a replica computes something else than health probes."""
        return any(record.num_tokens > 0 and not record.is_health_check for record in self.records)


@attrs.frozen(kw_only=True)
class PeerMessage:
    """What a leader tells its attention-TP peers beside the plan."""

    work: StepWork
    controls: tuple[Control, ...] = ()
    """Verbs to execute after this step."""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> PeerMessage:
        return msgspec.msgpack.decode(data, type=PeerMessage)


class StepSync(Protocol):
    """Makes all ranks agree on a step. Leaders call ``agree`` and ``tell_peers``, the other ranks ``follow``; each once a step."""

    def agree(self, record: StepRecord) -> AgreedStep:
        """Exchanges records between leaders and decides the plan."""
        ...

    def tell_peers(self, agreed: AgreedStep, message: bytes) -> None:
        """Hands plan, records and ``message`` to the attention-TP peers; nothing to do without any."""
        ...

    def follow(self, step: int, eplb_pass: int) -> tuple[AgreedStep, bytes]:
        """A peer's side of ``tell_peers``; the leader must be at the same step and pass."""
        ...

    def abort(self, message: str) -> None:
        """Tells the ranks that wait for this one that it will not come."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class InFlight:
    """A launched step. On a device with streams its tensors may not be finished yet."""

    scheduled: Scheduled | None
    """The leader's rows; None on a peer, which does not sample."""
    logits: torch.Tensor
    """[R, V] float32; those of a captured step are overwritten by the next one."""
    choice: StepChoice | None
    """The sampled ids, on the device and on their way to the host. None on a peer."""


class StepRunner(Protocol):
    """Computes batches on this rank."""

    def build(self, work: StepWork, plan: StepPlan) -> HostBatch:
        """This replica's batch, an idle one for no work."""
        ...

    def launch(self, plan: StepPlan, batch: HostBatch, scheduled: Scheduled | None, *, is_counted: bool) -> InFlight:
        """Starts the forward pass and, on the leader, the sampling. Tokens that are pending in ``batch`` are those of the launch before."""
        ...

    def collect(self, in_flight: InFlight) -> StepTokens:
        """Waits for the ids of the oldest launch that was not collected; no tokens on a peer."""
        ...


class BetweenSteps(Protocol):
    """Acts on every rank after every step, in the same order everywhere; it may hold collectives."""

    @property
    def is_busy(self) -> bool:
        """Ranks must not park, because something is under way that needs their steps. The same on all ranks."""
        ...

    def after_step(self, agreed: AgreedStep) -> None: ...


class LogitSink(Protocol):
    """Takes the logits of prompt rows, where they themselves are wanted (``crossdock logits``)."""

    def __call__(self, rid: str, start: int, logits: torch.Tensor) -> None:
        """``logits`` [rows, V] float32 of prompt positions from ``start`` on; copy what is kept."""
        ...
