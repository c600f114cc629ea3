"""Collectives between ranks of one machine through shared memory: ten times cheaper on the CPU than gloo for the rows of a decode step.

Each ordered pair of ranks has two slots. The sender fills a free one and counts it up, the receiver empties it and counts it up; larger
rows go in several chunks. A rank that waits moves whatever can move, so nobody's chunks wait for an order of calls. Starting an all-to-all
only fills slots, so begin and wait really are apart. Plain stores in this order are seen in this order on x86; elsewhere gloo is used.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from crossdock.comm_all_to_all import AllToAllComm, rows_as_bytes
from crossdock.errors import MisuseError, RankLost
from crossdock.shared_memory import Processes, Watch

Bytes = npt.NDArray[np.uint8]
LINE_INTS = 8
"""int64 in a cache line: counters of different writers share none."""
SLOTS = 2
LARGEST_SLOT = 1 << 20
SMALLEST_SLOT = 1 << 14
GROUP_BYTES = 1 << 23
"""About so much memory for the slots of a group; more ranks have smaller slots."""
DEFAULT_TIMEOUT_S = 600.0
"""Ranks load weights at different speed before their first collective."""


def slot_bytes(size: int) -> int:
    """Payload of a slot in a group of ``size`` ranks."""
    return min(max(GROUP_BYTES // size**2, SMALLEST_SLOT), LARGEST_SLOT)


def group_bytes(size: int) -> int:
    """Shared memory of a group: pids, two counters and a length a slot for each ordered pair, slots."""
    counters = 8 * LINE_INTS * (size + 2 * size**2)
    return counters + SLOTS * size**2 * slot_bytes(size)


@attrs.frozen(kw_only=True, eq=False)
class PairMemory:
    """The parts of a group's shared memory. First index: sender; second: receiver."""

    pids: npt.NDArray[np.int64]
    """[size]."""
    filled: npt.NDArray[np.int64]
    """[size, size, LINE_INTS]: slots filled so far, then the bytes in each slot. Written by the sender."""
    emptied: npt.NDArray[np.int64]
    """[size, size]: slots emptied so far. Written by the receiver."""
    slots: Bytes
    """[size, size, SLOTS, slot bytes]."""

    @staticmethod
    def over(memory: Bytes, size: int) -> PairMemory:
        counters = 8 * LINE_INTS * (size + 2 * size**2)
        ints = memory[:counters].view(np.int64)
        pids, filled, emptied = np.split(ints, [LINE_INTS * size, LINE_INTS * (size + size**2)])
        return PairMemory(
            pids=pids.reshape(size, LINE_INTS)[:, 0],
            filled=filled.reshape(size, size, LINE_INTS),
            emptied=emptied.reshape(size, size, LINE_INTS)[:, :, 0],
            slots=memory[counters:].reshape(size, size, SLOTS, slot_bytes(size)),
        )


@attrs.define(eq=False)
class _Stream:
    """What is left of the bytes between this rank and one other."""

    peer: int
    data: Bytes
    done: int = 0


@attrs.define(kw_only=True, eq=False)
class SharedPendingBytes:
    """An all-to-all in flight."""

    comm: SharedComm
    sends: list[_Stream]
    receives: list[_Stream]
    received: torch.Tensor
    sent: torch.Tensor
    """Kept alive until it is sent."""

    def wait(self) -> torch.Tensor:
        self.comm.finish(self)
        return self.received

    @property
    def is_done(self) -> bool:
        return not self.sends and not self.receives


@attrs.define(kw_only=True, eq=False)
class SharedState:
    """What changes in a ``SharedComm``."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    sending: deque[SharedPendingBytes] = attrs.field(factory=deque["SharedPendingBytes"])
    """Operations with bytes that are not sent, in the order of their begin."""
    receiving: deque[SharedPendingBytes] = attrs.field(factory=deque["SharedPendingBytes"])
    processes: Processes | None = None


@attrs.frozen(kw_only=True, eq=False)
class SharedComm(AllToAllComm):
    """``GroupComm`` over shared memory; tensors on the CPU."""

    memory: PairMemory
    state: SharedState = attrs.field(factory=SharedState)

    def __attrs_post_init__(self) -> None:
        self.memory.pids[self.rank] = os.getpid()

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        rows = rows_as_bytes(x.reshape(1, -1) if x.dim() == 0 else x)
        counts = [rows.shape[0] if index == source else 0 for index in range(self.size)]
        if self.rank == source:
            self._begin_gather(rows, counts).wait()
            return x
        received = self._begin(rows[:0], [0] * self.size, counts).wait()
        return received.view(x.dtype).view(x.shape)

    def _begin(self, rows: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> SharedPendingBytes:
        return self._start(rows, list(torch.split(rows, list(send_counts))), recv_counts)

    def _begin_gather(self, rows: torch.Tensor, recv_counts: Sequence[int]) -> SharedPendingBytes:
        return self._start(rows, [rows] * self.size, recv_counts)

    def _start(self, rows: torch.Tensor, parts: list[torch.Tensor], recv_counts: Sequence[int]) -> SharedPendingBytes:
        received = torch.empty((sum(recv_counts), rows.shape[1]), dtype=torch.uint8)
        places = list(torch.split(received, list(recv_counts)))
        places[self.rank].copy_(parts[self.rank])
        others = [index for index in range(self.size) if index != self.rank]
        operation = SharedPendingBytes(
            comm=self,
            sends=[_Stream(index, _flat(parts[index])) for index in others if parts[index].numel()],
            receives=[_Stream(index, _flat(places[index])) for index in others if places[index].numel()],
            received=received,
            sent=rows,
        )
        self.state.sending.append(operation)
        self.state.receiving.append(operation)
        self._move()
        return operation

    def finish(self, operation: SharedPendingBytes) -> None:
        """Waits for one operation, moving all that were begun.

        Raises:
            RankLost: a process of the group has ended, or does not take part within the time limit; names the rank.
        """

        def is_done() -> bool:
            self._move()
            return operation.is_done

        try:
            Watch(timeout_s=self.state.timeout_s, check=self._check).until(is_done)
        except TimeoutError:
            absent = sorted({self.ranks[stream.peer] for stream in (*operation.sends, *operation.receives)})
            raise RankLost(
                f"rank {self.ranks[self.rank]}: ranks {absent} of {list(self.ranks)} did not join a collective within "
                f"{self.state.timeout_s:g} s; see their logs",
                rank=absent[0] if len(absent) == 1 else None,
            ) from None

    def _move(self) -> None:
        """Sends and receives what can move now; bytes between two ranks keep the order of their operations."""
        sending, receiving = self.state.sending, self.state.receiving
        while sending:
            sends = sending[0].sends
            if sends:
                sends[:] = [stream for stream in sends if not self._send(stream)]
            if sends:
                break
            sending.popleft()
        while receiving:
            receives = receiving[0].receives
            if receives:
                receives[:] = [stream for stream in receives if not self._receive(stream)]
            if receives:
                break
            receiving.popleft()

    def _send(self, stream: _Stream) -> bool:
        """Fills free slots; True when everything is sent."""
        filled = self.memory.filled[self.rank, stream.peer]
        emptied = self.memory.emptied[self.rank]
        slots = self.memory.slots[self.rank, stream.peer]
        count, total = int(filled[0]), stream.data.size
        while stream.done < total and count - int(emptied[stream.peer]) < SLOTS:
            chunk = stream.data[stream.done : stream.done + slots.shape[1]]
            slots[count % SLOTS, : chunk.size] = chunk
            filled[1 + count % SLOTS] = chunk.size
            count += 1
            filled[0] = count
            stream.done += chunk.size
        return stream.done == total

    def _receive(self, stream: _Stream) -> bool:
        """Empties filled slots; True when everything has come."""
        filled = self.memory.filled[stream.peer, self.rank]
        emptied = self.memory.emptied[stream.peer]
        count, total = int(emptied[self.rank]), stream.data.size
        while stream.done < total and int(filled[0]) > count:
            length = int(filled[1 + count % SLOTS])
            if length > total - stream.done:
                raise MisuseError(
                    f"rank {self.ranks[self.rank]} expects {total - stream.done} more bytes of rank "
                    f"{self.ranks[stream.peer]}, which sent {length}: the ranks disagree about counts or about the order of "
                    "their collectives"
                )
            slot = self.memory.slots[stream.peer, self.rank, count % SLOTS]
            stream.data[stream.done : stream.done + length] = slot[:length]
            stream.done += length
            count += 1
            emptied[self.rank] = count
        return stream.done == total

    def _check(self) -> None:
        if self.state.processes is None and self.memory.pids.all():
            self.state.processes = Processes.of(self.memory.pids.tolist(), self.ranks)
        if self.state.processes is not None:
            self.state.processes.check()


def _flat(rows: torch.Tensor) -> Bytes:
    """The bytes of contiguous rows, without a copy."""
    flat: Bytes = rows.view(-1).numpy() if rows.numel() else np.empty(0, dtype=np.uint8)
    return flat
