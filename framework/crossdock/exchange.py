"""The exchange of step records between replica leaders: host values only, one table a step, equal for everyone (DESIGN section 5).

Over shared memory on one machine, over gloo between machines, and not at all with one replica. A deadline ends the wait with the ranks
that did not arrive and what is known of them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import attrs

from crossdock.errors import ExchangeTimeout
from crossdock.types.step import ForwardMode, StepRecord

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

RECORD_FIELDS = tuple(field.name for field in attrs.fields(StepRecord))
_VALUES = operator.attrgetter(*RECORD_FIELDS)
NOTICE_KEY = "crossdock/abort"
NOTICE_POLL_S = 0.2
"""How often a rank that waits long looks for a notice in the store."""


class StepExchange(Protocol):
    """One leader's end. Leaders call ``exchange`` once a step, in lockstep."""

    @property
    def transport(self) -> str:
        """``shm``, ``gloo`` or ``none``; for the receipt."""
        ...

    @property
    def waited_s(self) -> float:
        """How long the last exchange waited for the other replicas."""
        ...

    def exchange(self, record: StepRecord) -> tuple[StepRecord, ...]:
        """Everybody's record, in replica order.

        Raises:
            ExchangeTimeout: replicas did not arrive within the deadline; names their ranks.
            RankLost: a rank or the supervisor called ``abort``.
        """
        ...

    def abort(self, message: str) -> None:
        """Makes every waiting leader, and everyone who exchanges later, raise ``RankLost`` with this message."""
        ...

    def close(self) -> None: ...


class AbortNotice(Protocol):
    """A place outside the exchange where a supervisor or a rank on another machine leaves the reason to stop."""

    def read(self) -> str | None: ...

    def write(self, message: str) -> None: ...


@attrs.frozen(eq=False)
class StoreNotice:
    """A notice in torch.distributed's store, which the supervisor of the first machine hosts."""

    store: Store

    def read(self) -> str | None:
        if not self.store.check([NOTICE_KEY]):
            return None
        return self.store.get(NOTICE_KEY).decode()

    def write(self, message: str) -> None:
        """The first message stays: it names the culprit, later ones its consequences."""
        self.store.compare_set(NOTICE_KEY, "", message)


@attrs.define(eq=False)
class OneReplica:
    """The exchange of a layout with one replica: nobody to wait for."""

    transport: str = "none"
    waited_s: float = 0.0

    def exchange(self, record: StepRecord) -> tuple[StepRecord, ...]:
        return (record,)

    def abort(self, message: str) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is open."""


def record_values(record: StepRecord) -> tuple[int, ...]:
    """Its integers in the order of ``RECORD_FIELDS``."""
    values: tuple[int, ...] = _VALUES(record)
    return values


def records_of(rows: Sequence[Sequence[int]]) -> tuple[StepRecord, ...]:
    """One record for each row of integers in the order of ``RECORD_FIELDS``."""
    return tuple(StepRecord(**dict(zip(RECORD_FIELDS, row, strict=True))) for row in rows)


def missing_replicas(
    record: StepRecord,
    missing: Sequence[int],
    leaders: Sequence[int],
    last_seen: Sequence[StepRecord | None],
    *,
    transport: str,
    timeout_s: float,
) -> ExchangeTimeout:
    """The error that names what did not arrive, and where it was last seen."""
    known: list[str] = []
    for replica in missing:
        seen = last_seen[replica]
        where = "never seen" if seen is None else f"last seen at step {seen.step}, {_mode_name(seen)}"
        known.append(f"replica {replica} (rank {leaders[replica]}, {where})")
    who = ", ".join(known) or "unknown replicas"
    return ExchangeTimeout(
        f"step {record.step}: {who} did not arrive at the exchange over {transport} within {timeout_s:g} s; look at the "
        "log of that rank, or raise the step deadline if its work is that long",
        missing_ranks=[leaders[replica] for replica in missing],
    )


def _mode_name(record: StepRecord) -> str:
    return f"{ForwardMode(record.local_forward_mode).name.lower()} with {record.num_tokens} tokens"
