"""The exchange over shared memory of one machine: a table of rows with sequence flags, double buffered, no system call when all are there.

A leader writes its row and then the row's sequence number; it has everybody's rows when all numbers have reached its own. Two buffers
suffice: whoever writes exchange k + 2 has finished k + 1, so all others have posted k + 1, so they have read k. Plain stores in this order
are seen in this order on x86; other architectures would need a fence.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from crossdock.errors import ExchangeTimeout, RankLost
from crossdock.exchange import (
    RECORD_FIELDS,
    AbortNotice,
    missing_replicas,
    record_values,
    records_of,
)
from crossdock.shared_memory import Processes, Watch
from crossdock.types.step import StepRecord

LINE_INTS = 8
"""int64 in a cache line: rows of different ranks share none."""
ROW_INTS = -(-(1 + len(RECORD_FIELDS)) // LINE_INTS) * LINE_INTS
RECORD = slice(1, 1 + len(RECORD_FIELDS))
"""Of a row, after its sequence number."""
ABORT_BYTES = 2048


def table_bytes(replicas: int) -> int:
    """Size of the shared table: length of the abort message, pids, two buffers of rows, the message."""
    return 8 * (LINE_INTS + replicas * LINE_INTS + 2 * replicas * ROW_INTS) + ABORT_BYTES


@attrs.frozen(kw_only=True, eq=False)
class SharedTable:
    """The parts of the shared bytes."""

    abort_length: npt.NDArray[np.int64]
    """[0]: 0 while there is no abort message."""
    pids: npt.NDArray[np.int64]
    """[replicas]."""
    rows: npt.NDArray[np.int64]
    """[2, replicas, ROW_INTS]: sequence number, then the record."""
    message: npt.NDArray[np.uint8]

    @staticmethod
    def over(memory: npt.NDArray[np.uint8], replicas: int) -> SharedTable:
        ints = memory[: table_bytes(replicas) - ABORT_BYTES].view(np.int64)
        pids, rows = np.split(ints[LINE_INTS:], [replicas * LINE_INTS])
        return SharedTable(
            abort_length=ints[:1],
            pids=pids.reshape(replicas, LINE_INTS)[:, 0],
            rows=rows.reshape(2, replicas, ROW_INTS),
            message=memory[table_bytes(replicas) - ABORT_BYTES :],
        )

    def abort(self, message: str) -> None:
        """The first message stays: it names the culprit, later ones its consequences."""
        if self.abort_length[0]:
            return
        data = (message or "stopped").encode()[:ABORT_BYTES]
        self.message[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        self.abort_length[0] = len(data)

    def check_abort(self) -> None:
        """Raises ``RankLost`` when there is a message."""
        length = int(self.abort_length[0])
        if length:
            raise RankLost(self.message[:length].tobytes().decode(errors="replace"))


@attrs.define(kw_only=True, eq=False)
class SharedMemoryExchange:
    """One leader's end of the shared table."""

    table: SharedTable
    attn_dp_rank: int
    leaders: Sequence[int]
    """Leader rank of each replica."""
    timeout_s: float
    notice: AbortNotice | None = None
    waited_s: float = attrs.field(default=0.0, init=False)
    _sequence: int = attrs.field(default=0, init=False)
    _processes: Processes | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self.table.pids[self.attn_dp_rank] = os.getpid()

    @property
    def transport(self) -> str:
        return "shm"

    def exchange(self, record: StepRecord) -> tuple[StepRecord, ...]:
        self._sequence = sequence = self._sequence + 1
        rows = self.table.rows[sequence % 2]
        own = rows[self.attn_dp_rank]
        own[RECORD] = record_values(record)
        own[0] = sequence
        sequences, aborted = rows[:, 0], self.table.abort_length
        watch = Watch(timeout_s=self.timeout_s, check=self._check)
        try:
            self.waited_s = watch.until(lambda: bool(sequences.min() >= sequence or aborted[0]))
        except TimeoutError:
            raise self._timeout(sequences, record) from None
        self.table.check_abort()
        return records_of(rows[:, RECORD].tolist())

    def abort(self, message: str) -> None:
        self.table.abort(message)
        if self.notice is not None:
            self.notice.write(message)

    def close(self) -> None:
        """The memory goes with the last process that maps it."""

    def _check(self) -> None:
        """A notice, or a leader that has ended. Pids are complete once somebody has exchanged; a first wait may be before that."""
        message = None if self.notice is None else self.notice.read()
        if message is not None:
            self.table.abort(message)
            raise RankLost(message)
        if self._processes is None and self.table.pids.all():
            self._processes = Processes.of(self.table.pids.tolist(), self.leaders)
        if self._processes is not None:
            try:
                self._processes.check()
            except RankLost as lost:
                self.table.abort(str(lost))
                raise

    def _timeout(self, sequences: npt.NDArray[np.int64], record: StepRecord) -> ExchangeTimeout:
        missing = [replica for replica, sequence in enumerate(sequences.tolist()) if sequence < self._sequence]
        before = self.table.rows[(self._sequence - 1) % 2].copy()
        seen = [records_of([row[RECORD].tolist()])[0] if row[0] else None for row in before]
        error = missing_replicas(
            record, missing, self.leaders, seen, transport="shared memory", timeout_s=self.timeout_s
        )
        self.abort(str(error))
        return error
