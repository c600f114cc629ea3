"""The exchange over shared memory of one machine: a table of rows with sequence flags, double buffered, no system call when all are there.

A leader writes its row and then the row's sequence number; it has everybody's rows when all numbers have reached its own. Two buffers
suffice: whoever writes exchange k + 2 has finished k + 1, so all others have posted k + 1, so they have read k. Plain stores in this order
are seen in this order on x86; other architectures would need a fence.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt

from crossdock.errors import RankLost
from crossdock.exchange import (
    NOTICE_POLL_S,
    RECORD_FIELDS,
    AbortNotice,
    missing_replicas,
    record_values,
    records_of,
)
from crossdock.types.step import StepRecord

LINE_INTS = 8
"""int64 in a cache line: rows of different ranks share none."""
ROW_INTS = -(-(1 + len(RECORD_FIELDS)) // LINE_INTS) * LINE_INTS
RECORD = slice(1, 1 + len(RECORD_FIELDS))
"""Of a row, after its sequence number."""
HEADER_INTS = LINE_INTS
ABORT_BYTES = 2048
SPINS = 20
"""Looks before the first yield: everybody is there already, or arrives within microseconds."""
YIELDS = 50
"""Yields before the first sleep: with more ranks than cores somebody else needs this one."""
SHORTEST_SLEEP_S = 20e-6
LONGEST_SLEEP_S = 1e-3
SLEEP_SHARE = 0.05
"""A sleep is at most this share of the wait so far, so sleeping adds no more than that to it."""


def shared_folder() -> Path:
    """Memory-backed where the machine has such a folder."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def create_table(replicas: int) -> Path:
    """A new zeroed table for so many replicas. The creator removes the file as soon as all leaders have opened it: then nothing is left
    behind, however the processes end."""
    path = shared_folder() / f"crossdock-step-{os.getpid()}-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.ftruncate(descriptor, table_bytes(replicas))
    finally:
        os.close(descriptor)
    return path


def table_bytes(replicas: int) -> int:
    return 8 * (HEADER_INTS + 2 * replicas * ROW_INTS) + ABORT_BYTES


@attrs.define(eq=False)
class SharedTable:
    """A mapped table. ``header[0]``: length of the abort message, 0 while there is none."""

    path: Path
    replicas: int
    header: npt.NDArray[np.int64] = attrs.field(init=False)
    rows: npt.NDArray[np.int64] = attrs.field(init=False)
    """[2, replicas, ROW_INTS]: sequence number, then the record."""
    message: npt.NDArray[np.uint8] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            memory = mmap.mmap(descriptor, table_bytes(self.replicas))
        finally:
            os.close(descriptor)
        ints = np.frombuffer(memory, dtype=np.int64, count=HEADER_INTS + 2 * self.replicas * ROW_INTS)
        self.header = ints[:HEADER_INTS]
        self.rows = ints[HEADER_INTS:].reshape(2, self.replicas, ROW_INTS)
        self.message = np.frombuffer(memory, dtype=np.uint8, offset=ints.nbytes, count=ABORT_BYTES)

    def abort(self, message: str) -> None:
        """The first message stays."""
        if self.header[0]:
            return
        data = (message or "stopped").encode()[:ABORT_BYTES]
        self.message[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        self.header[0] = len(data)

    def abort_message(self) -> str | None:
        length = int(self.header[0])
        return self.message[:length].tobytes().decode(errors="replace") if length else None


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

    @property
    def transport(self) -> str:
        return "shm"

    def exchange(self, record: StepRecord) -> tuple[StepRecord, ...]:
        self._sequence += 1
        rows = self.table.rows[self._sequence % 2]
        own = rows[self.attn_dp_rank]
        own[RECORD] = record_values(record)
        own[0] = self._sequence
        started_s = time.monotonic()
        self._wait(rows[:, 0], record, started_s)
        self.waited_s = time.monotonic() - started_s
        return records_of(rows[:, RECORD].tolist())

    def abort(self, message: str) -> None:
        self.table.abort(message)
        if self.notice is not None:
            self.notice.write(message)

    def close(self) -> None:
        """The memory goes with the last process that maps it."""

    def _wait(self, sequences: npt.NDArray[np.int64], record: StepRecord, started_s: float) -> None:
        looks = 0
        noticed_s = started_s
        while True:
            if self.table.header[0]:
                raise RankLost(str(self.table.abort_message()))
            if int(sequences.min()) >= self._sequence:
                return
            looks += 1
            if looks <= SPINS:
                continue
            if looks <= SPINS + YIELDS:
                os.sched_yield()
                continue
            now_s = time.monotonic()
            if now_s - started_s > self.timeout_s:
                raise self._timeout(sequences, record)
            if now_s - noticed_s > NOTICE_POLL_S:
                noticed_s = now_s
                self._read_notice()
            time.sleep(min(max((now_s - started_s) * SLEEP_SHARE, SHORTEST_SLEEP_S), LONGEST_SLEEP_S))

    def _read_notice(self) -> None:
        message = None if self.notice is None else self.notice.read()
        if message is not None:
            self.table.abort(message)
            raise RankLost(message)

    def _timeout(self, sequences: npt.NDArray[np.int64], record: StepRecord) -> Exception:
        missing = [replica for replica, sequence in enumerate(sequences.tolist()) if sequence < self._sequence]
        before = self.table.rows[(self._sequence - 1) % 2].copy()
        seen = [records_of([row[RECORD].tolist()])[0] if row[0] else None for row in before]
        error = missing_replicas(
            record, missing, self.leaders, seen, transport="shared memory", timeout_s=self.timeout_s
        )
        self.abort(str(error))
        return error
