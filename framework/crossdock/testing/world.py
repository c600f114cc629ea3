"""Ranks for tests: a pool of real processes with gloo, and a world of threads in one process.

The pool starts its processes once (importing torch alone takes seconds) and runs one function after the other on all of them. A hang
is a failure that names the ranks; the pool then starts afresh. A process ends when the test process does, however that ends.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import attrs

from crossdock.comm import RankComms
from crossdock.groups import rank_place
from crossdock.testing.rank_worker import CallFailed, FunctionRef, RankCall
from crossdock.testing.thread_comm import ThreadRendezvous, thread_comms
from crossdock.types.parallel import ParallelSizes, RankPlace

T = TypeVar("T")

WORKER_CODE = "from crossdock.testing.rank_worker import main; main()"
START_TIMEOUT_S = 120.0
"""For all processes to import torch and find each other, on a busy machine."""
AFTER_FAILURE_S = 5.0
"""How long the other ranks may take to answer once one of them has failed; they may wait for it in a collective."""


class RankFailure(AssertionError):
    """A function failed or hung on a rank; the message holds the rank and its traceback."""


class RankHang(RankFailure):
    """Ranks did not answer in time."""


@attrs.frozen(kw_only=True, eq=False)
class RankContext:
    """What a function that runs on a pool gets first."""

    rank: int
    size: int
    comms_of: Callable[[ParallelSizes], RankComms]
    """Groups of a layout over all ranks of the pool; collective at its first call, kept afterwards."""
    device: str = "cpu"
    ranks_per_gpu: int = 1
    """Ranks of the pool that share this rank's GPU; each may take its part of the memory."""

    def place(self, sizes: ParallelSizes) -> RankPlace:
        return rank_place(sizes, self.rank)


@attrs.define(eq=False)
class _Process:
    popen: subprocess.Popen[bytes]
    channel: Connection
    lifeline: int
    """Write end of a pipe nobody writes to: the process ends when it closes, that is when we do."""


@attrs.define(eq=False)
class RankPool:
    """``world_size`` processes with one gloo group, started at the first ``run``; with ``device`` cuda NCCL beside gloo, and a GPU each or, where there are fewer, shared ones."""

    world_size: int
    device: str = "cpu"
    _processes: list[_Process] = attrs.field(factory=list[_Process], init=False)
    _folder: tempfile.TemporaryDirectory[str] | None = attrs.field(default=None, init=False)

    def run(
        self,
        function: Callable[..., T],
        *args: object,
        timeout_s: float = 60.0,
    ) -> list[T]:
        """Results of ``function(context, *args)`` on every rank, in rank order.

        Args:
            function: defined at the top level of a module.
            args: the same for all ranks; pickled.
            timeout_s: for all ranks together, without the start of the processes.

        Raises:
            RankFailure: the function raised on a rank, or a process ended.
            RankHang: a rank did not answer in time; ``faulthandler`` writes its stack to stderr.
        """
        self._start()
        call = RankCall(function=FunctionRef.of(function), args=pickle.dumps(args))
        for process in self._processes:
            process.channel.send(call)
        return self._answers(function.__name__, time.monotonic() + timeout_s)

    def close(self) -> None:
        """Ends the processes; a later ``run`` starts new ones."""
        for process in self._processes:
            process.popen.kill()
            process.popen.wait()
            process.channel.close()
            os.close(process.lifeline)
        self._processes = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        if self._processes:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="crossdock-ranks-")
        store_file = Path(self._folder.name) / "store"
        self._processes = [
            start_rank(rank, self.world_size, store_file, self.device) for rank in range(self.world_size)
        ]
        self._answers("start of the ranks", time.monotonic() + START_TIMEOUT_S)

    def _answers(self, what: str, deadline: float) -> list[Any]:
        """One answer of each rank; ends the pool when one is missing or only some of them failed."""
        answers: dict[int, Any] = {}
        waiting = {process.channel: rank for rank, process in enumerate(self._processes)}
        while waiting:
            ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for channel in ready:
                assert isinstance(channel, Connection)
                rank = waiting.pop(channel)
                answers[rank] = _receive(channel)
                if isinstance(answers[rank], CallFailed):
                    deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, CallFailed)}
        missing = sorted(waiting.values())
        if missing or failures:
            self._show_stacks(missing)
            self.close()
        if failures:
            rank, failure = min(failures.items())
            raise RankFailure(f"{what}: failed on ranks {sorted(failures)}; rank {rank} says:\n{failure.traceback}")
        if missing:
            raise RankHang(f"{what}: ranks {missing} of {self.world_size} did not answer in time")
        return [answers[rank] for rank in range(self.world_size)]

    def _show_stacks(self, ranks: list[int]) -> None:
        """Hung ranks write their stacks to stderr."""
        for rank in ranks:
            self._processes[rank].popen.send_signal(signal.SIGUSR1)
        for rank in ranks:
            try:
                self._processes[rank].popen.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue


def start_rank(rank: int, world_size: int, store_file: Path, device: str = "cpu") -> _Process:
    """One rank process of a pool; it answers once when it has joined the others."""
    ours, theirs = socket.socketpair()
    read_end, write_end = os.pipe()
    arguments = [str(number) for number in (rank, world_size, theirs.fileno(), read_end)]
    popen = subprocess.Popen(
        [sys.executable, "-c", WORKER_CODE, *arguments, str(store_file), device],
        pass_fds=(theirs.fileno(), read_end),
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    os.close(read_end)
    return _Process(popen=popen, channel=Connection(ours.detach()), lifeline=write_end)


def _receive(channel: Connection) -> Any:
    try:
        return channel.recv()
    except EOFError:
        return CallFailed(traceback="the process ended")


@attrs.frozen
class OneProcessWorld:
    """A layout's ranks as threads of this process: real control flow and shapes, no process and no network."""

    sizes: ParallelSizes

    def run(self, function: Callable[..., T], *args: object, timeout_s: float = 30.0) -> list[T]:
        """Results of ``function(context, *args)`` on every rank, in rank order.

        Raises:
            RankFailure: the function raised on a rank; the cause is chained.
            RankHang: ranks did not finish in time, or wait in different collectives.
        """
        rendezvous = ThreadRendezvous(timeout_s=timeout_s)
        results: dict[int, T] = {}
        errors: dict[int, BaseException] = {}

        def run_rank(rank: int) -> None:
            comms = thread_comms(self.sizes, rank, rendezvous)
            context = RankContext(rank=rank, size=self.sizes.ranks, comms_of=lambda sizes: comms)
            try:
                results[rank] = function(context, *args)
            except BaseException as error:  # noqa: BLE001 - pytest's failures are no Exception
                errors[rank] = error
                rendezvous.abort()

        threads = [
            threading.Thread(target=run_rank, args=(rank,), daemon=True, name=f"rank {rank}")
            for rank in range(self.sizes.ranks)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))
        return self._results(results, errors)

    def _results(self, results: dict[int, T], errors: dict[int, BaseException]) -> list[T]:
        causes = {rank: error for rank, error in errors.items() if not isinstance(error, threading.BrokenBarrierError)}
        if causes:
            rank, error = min(causes.items())
            raise RankFailure(f"failed on ranks {sorted(causes)}; rank {rank}: {error!r}") from error
        missing = [rank for rank in range(self.sizes.ranks) if rank not in results]
        if missing:
            raise RankHang(f"ranks {missing} of {self.sizes.ranks} did not finish: they wait in different collectives")
        return [results[rank] for rank in range(self.sizes.ranks)]
