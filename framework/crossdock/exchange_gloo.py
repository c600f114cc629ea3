"""The exchange between machines: one gloo all-to-all of the leaders, and the store for those that do not come."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs
import torch

from crossdock.comm_gloo import c10d
from crossdock.errors import ExchangeTimeout, RankLost
from crossdock.exchange import (
    NOTICE_POLL_S,
    RECORD_FIELDS,
    AbortNotice,
    missing_replicas,
    record_values,
    records_of,
)
from crossdock.types.step import StepRecord

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup, Store, Work

ROLL_CALL_S = 1.0
"""After a deadline, how long the living have to say that they are waiting too."""


@attrs.define(kw_only=True, eq=False)
class GlooExchange:
    """One leader's end."""

    group: ProcessGroup
    """All leaders, in replica order."""
    store: Store
    attn_dp_rank: int
    leaders: Sequence[int]
    timeout_s: float
    notice: AbortNotice
    waited_s: float = attrs.field(default=0.0, init=False)
    _last_seen: tuple[StepRecord, ...] = attrs.field(default=(), init=False)

    @property
    def transport(self) -> str:
        return "gloo"

    def exchange(self, record: StepRecord) -> tuple[StepRecord, ...]:
        replicas = len(self.leaders)
        sent = torch.tensor([record_values(record)] * replicas, dtype=torch.int64)
        received = torch.empty((replicas, len(RECORD_FIELDS)), dtype=torch.int64)
        started_s = time.monotonic()
        try:
            work = c10d.all_to_all_single(received, sent, group=self.group, async_op=True)
            wait_for(work, self.timeout_s, self.notice)
        except TimeoutError:
            raise self._timeout(record) from None
        except RuntimeError as error:
            raise RankLost(
                f"step {record.step}: the exchange over gloo failed, a leader among ranks {list(self.leaders)} has ended "
                f"({str(error).splitlines()[0]}); see the other ranks' logs"
            ) from error
        self.waited_s = time.monotonic() - started_s
        self._last_seen = records_of(cast("Any", received).tolist())
        return self._last_seen

    def abort(self, message: str) -> None:
        self.notice.write(message)

    def close(self) -> None:
        """The process group goes with the process."""

    def _timeout(self, record: StepRecord) -> ExchangeTimeout:
        """A roll call in the store: who waits at this step says so, the others are missing."""
        keys = [f"crossdock/waiting/{record.step}/{replica}" for replica in range(len(self.leaders))]
        self.store.set(keys[self.attn_dp_rank], "1")
        ends_s = time.monotonic() + ROLL_CALL_S
        while time.monotonic() < ends_s and not self.store.check(keys):
            time.sleep(NOTICE_POLL_S / 10)
        missing = [replica for replica, key in enumerate(keys) if not self.store.check([key])]
        seen = self._last_seen or (None,) * len(self.leaders)
        error = missing_replicas(record, missing, self.leaders, seen, transport="gloo", timeout_s=self.timeout_s)
        self.abort(str(error))
        return error


def wait_for(work: Work | Any, timeout_s: float, notice: AbortNotice | None) -> None:
    """Waits for a collective without using the CPU, looking for a notice now and then.

    Raises:
        TimeoutError: it is not done within ``timeout_s``; the group must not be used again.
        RankLost: a notice was left.
        RuntimeError: the collective itself failed.
    """
    ends_s = time.monotonic() + timeout_s
    while True:
        try:
            work.wait(datetime.timedelta(seconds=min(NOTICE_POLL_S, timeout_s)))
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # it finished meanwhile, or this raises why it failed
                return
        message = None if notice is None else notice.read()
        if message is not None:
            raise RankLost(message)
        if time.monotonic() >= ends_s:
            raise TimeoutError
