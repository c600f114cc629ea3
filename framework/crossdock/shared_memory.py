"""Memory that processes of one machine share, and waiting for what another process writes there.

A file without a name, which the others open through the creator's descriptor: nothing is left behind, however and whenever the processes
end, and a small ``/dev/shm`` is no limit. (The standard library's ``SharedMemory`` starts a tracker process in every rank and unlinks at
exit, which a killed creator never reaches.)
"""

from __future__ import annotations

import mmap
import os
import platform
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt
import psutil
import torch

from crossdock.errors import RankLost
from crossdock.types.comm import GroupComm

ORDERED_STORES = ("x86_64", "amd64")
"""Processors on which plain stores are seen in their order, which is all that users of this memory rely on."""
ADDRESS_FIELDS = 3
"""Process, descriptor and inode of the shared file; the inode tells it from another one that took the descriptor's place."""
SPIN_S = 20e-6
"""Before the first yield: everybody is there already, or arrives within microseconds."""
YIELD_S = 60e-6
"""Before the first sleep: with more ranks than cores somebody else needs this one."""
SHORTEST_SLEEP_S = 20e-6
LONGEST_SLEEP_S = 1e-3
SLEEP_SHARE = 0.05
"""A sleep is at most this share of the wait so far, so sleeping adds no more than that to it."""
CHECK_S = 0.2
"""How often a long wait looks whether the others are still alive."""


@attrs.frozen(kw_only=True, eq=False)
class Watch:
    """What ends a wait besides its condition: a deadline, a dead process, a notice."""

    timeout_s: float
    check: Callable[[], None]
    """Called now and then in a long wait; raises what ends it."""

    def until(self, is_met: Callable[[], bool]) -> float:
        """Seconds until ``is_met``: looks, then yields, then sleeps.

        Raises:
            TimeoutError: not met within ``timeout_s``.
        """
        started_s = checked_s = time.monotonic()
        while not is_met():
            now_s = time.monotonic()
            waited_s = now_s - started_s
            if waited_s < SPIN_S:
                continue
            if waited_s < YIELD_S:
                os.sched_yield()
                continue
            if waited_s > self.timeout_s:
                raise TimeoutError
            if now_s - checked_s > CHECK_S:
                checked_s = now_s
                self.check()
            time.sleep(min(max(waited_s * SLEEP_SHARE, SHORTEST_SLEEP_S), LONGEST_SLEEP_S))
        return time.monotonic() - started_s


@attrs.frozen
class Processes:
    """The processes of ranks on this machine, to notice one that is gone."""

    by_rank: dict[int, psutil.Process]

    @staticmethod
    def of(pids: Sequence[int], ranks: Sequence[int]) -> Processes:
        """Processes that can be seen from here; in another pid namespace there are none, and only the deadline helps."""
        found: dict[int, psutil.Process] = {}
        for rank, pid in zip(ranks, pids, strict=True):
            if pid != os.getpid() and psutil.pid_exists(pid):
                found[rank] = psutil.Process(pid)
        return Processes(found)

    def check(self) -> None:
        """Raises ``RankLost`` for a process that has ended."""
        for rank, process in self.by_rank.items():
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                raise RankLost(f"the process of rank {rank} (pid {process.pid}) has ended; see its log", rank=rank)


def machine_name() -> str:
    """Host name, boot and process namespace: equal for processes that can see each other's descriptors."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = (boot.read_text().strip() if boot.exists() else "", os.readlink(namespace) if namespace.exists() else "")
    return " ".join((socket.gethostname(), *parts))


def share_memory(comm: GroupComm, num_bytes: int, machine: str) -> npt.NDArray[np.uint8] | None:
    """Zeroed bytes that all members of a group see; None, on all of them, when they cannot share. Collective, CPU tensors.

    Args:
        machine: name of this rank's machine; members on different ones share nothing.
    """
    if platform.machine().lower() not in ORDERED_STORES:
        return None
    names = comm.all_gather(torch.tensor([zlib.crc32(machine.encode())]))
    if int(names.max()) != int(names.min()):
        return None
    descriptor = _created(num_bytes) if comm.rank == 0 else None
    address = torch.zeros(ADDRESS_FIELDS, dtype=torch.int64)
    if descriptor is not None:
        address = torch.tensor([os.getpid(), descriptor, os.fstat(descriptor).st_ino])
    pid, theirs, inode = comm.broadcast(address, 0).tolist()
    memory = mapped_bytes(pid, theirs, inode, num_bytes)
    opened = comm.all_gather(torch.tensor([int(memory is not None)]))
    if descriptor is not None:
        os.close(descriptor)
    return memory if bool(opened.all()) else None


def _created(num_bytes: int) -> int | None:
    """Descriptor of a new zeroed file; None where there is no such thing, or no room."""
    if not hasattr(os, "memfd_create"):
        return None
    descriptor = os.memfd_create("crossdock")
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def mapped_bytes(pid: int, descriptor: int, inode: int, num_bytes: int) -> npt.NDArray[np.uint8] | None:
    """What process ``pid`` (0: there is none) holds open as ``descriptor``; None when it cannot be opened, or is another file."""
    if not pid:
        return None
    try:
        ours = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    except OSError:
        return None
    try:
        if os.fstat(ours).st_ino != inode:
            return None
        return np.frombuffer(mmap.mmap(ours, num_bytes), dtype=np.uint8)
    except (OSError, ValueError):
        return None
    finally:
        os.close(ours)
