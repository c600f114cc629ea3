"""Messages from a replica's leader to its attention-TP peers: over shared memory on one machine, else over gloo."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt
import torch

from crossdock.comm_gloo import GlooComm, c10d
from crossdock.errors import RankLost
from crossdock.exchange import AbortNotice
from crossdock.exchange_gloo import wait_for
from crossdock.shared_memory import Processes, Watch

LENGTH_BYTES = 8
CHUNK_BYTES = 1 << 14
"""One message nearly always fits; a longer one comes in several chunks."""
LINE_INTS = 8


class PeerChannel(Protocol):
    """One rank's end. The leader calls ``send`` and every peer ``receive``, once a message."""

    @property
    def leader(self) -> int:
        """Its rank."""
        ...

    @property
    def timeout_s(self) -> float: ...

    def send(self, data: bytes) -> None: ...

    def receive(self) -> bytes:
        """The leader's next message.

        Raises:
            TimeoutError: nothing came in time.
            RankLost: the leader has ended, or somebody called for a stop.
        """
        ...


@attrs.frozen(kw_only=True, eq=False)
class GlooPeerChannel:
    """Broadcasts of bytes over the replica's gloo group."""

    comm: GlooComm
    timeout_s: float
    notice: AbortNotice | None = None

    @property
    def leader(self) -> int:
        return self.comm.ranks[0]

    def send(self, data: bytes) -> None:
        for chunk in _chunks(data):
            buffer = torch.zeros(CHUNK_BYTES, dtype=torch.uint8)
            buffer[: len(chunk)] = torch.frombuffer(bytearray(chunk), dtype=torch.uint8)
            self._broadcast(buffer)

    def receive(self) -> bytes:
        return _joined(self._next_chunk)

    def _next_chunk(self) -> bytes:
        buffer = torch.zeros(CHUNK_BYTES, dtype=torch.uint8)
        self._broadcast(buffer)
        return buffer.numpy().tobytes()

    def _broadcast(self, buffer: torch.Tensor) -> None:
        with self.comm.named_failure("step message"):
            work = c10d.broadcast(buffer, self.comm.ranks[0], group=self.comm.group, async_op=True)
            wait_for(work, self.timeout_s, self.notice)


def channel_bytes(size: int) -> int:
    """Size of the shared memory of a replica of ``size`` ranks: a counter and a pid for each rank, two chunks."""
    return 8 * LINE_INTS * 2 * size + 2 * CHUNK_BYTES


@attrs.define(kw_only=True, eq=False)
class SharedPeerChannel:
    """Two chunks in shared memory, written by the leader in turn; a chunk is written again once every peer has read it."""

    memory: npt.NDArray[np.uint8]
    """``channel_bytes(len(ranks))``, zeroed."""
    ranks: tuple[int, ...]
    """Of the replica, the leader first."""
    index: int
    """Of this rank in ``ranks``."""
    timeout_s: float
    notice: AbortNotice | None = None
    _done: int = attrs.field(default=0, init=False)
    """Chunks that this rank has written or read."""
    _counters: npt.NDArray[np.int64] = attrs.field(init=False)
    """[ranks]: how many chunks each has written or read."""
    _pids: npt.NDArray[np.int64] = attrs.field(init=False)
    _chunks: npt.NDArray[np.uint8] = attrs.field(init=False)
    _processes: Processes | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        head = 8 * LINE_INTS * 2 * len(self.ranks)
        lines = self.memory[:head].view(np.int64).reshape(2, len(self.ranks), LINE_INTS)
        self._counters, self._pids = lines[0, :, 0], lines[1, :, 0]
        self._chunks = self.memory[head:].reshape(2, CHUNK_BYTES)
        self._pids[self.index] = os.getpid()

    @property
    def leader(self) -> int:
        return self.ranks[0]

    def send(self, data: bytes) -> None:
        """Returns when the message is written; peers may be up to two chunks behind.

        Raises:
            TimeoutError: a peer did not read the chunk before the last one in time.
        """
        for chunk in _chunks(data):
            oldest, peers = self._done - 1, self._counters[1:]
            self._watch().until(lambda: bool(peers.min() >= oldest))  # noqa: B023 - runs before the next turn
            slot = self._chunks[self._done % 2]
            slot[: len(chunk)] = np.frombuffer(chunk, dtype=np.uint8)
            self._count()

    def receive(self) -> bytes:
        return _joined(self._next_chunk)

    def _next_chunk(self) -> bytes:
        counters, before = self._counters, self._done
        self._watch().until(lambda: bool(counters[0] > before))
        chunk: bytes = self._chunks[self._done % 2].tobytes()
        self._count()
        return chunk

    def _count(self) -> None:
        self._done += 1
        self._counters[self.index] = self._done

    def _watch(self) -> Watch:
        return Watch(timeout_s=self.timeout_s, check=self._check)

    def _check(self) -> None:
        message = None if self.notice is None else self.notice.read()
        if message is not None:
            raise RankLost(message)
        if self._processes is None and self._pids.all():
            self._processes = Processes.of(self._pids.tolist(), self.ranks)
        if self._processes is not None:
            self._processes.check()


def _chunks(data: bytes) -> Iterator[bytes]:
    """The message with its length in front, cut into chunks."""
    framed = len(data).to_bytes(LENGTH_BYTES, "little") + data
    for start in range(0, len(framed), CHUNK_BYTES):
        yield framed[start : start + CHUNK_BYTES]


def _joined(next_chunk: Callable[[], bytes]) -> bytes:
    """The message that ``_chunks`` cut; a chunk may be longer than what was sent in it."""
    chunk = next_chunk()
    length = int.from_bytes(chunk[:LENGTH_BYTES], "little")
    data = chunk[LENGTH_BYTES : LENGTH_BYTES + length]
    while len(data) < length:
        data += next_chunk()[: length - len(data)]
    return data
