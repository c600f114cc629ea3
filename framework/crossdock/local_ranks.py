"""Rank processes of one machine for a job that ends by itself (``logits``, ``generate``): started together, ended together.

Serving has the supervisor of ``crossdock.launch``; this is the small form for jobs without a frontend. A rank ends when this process does,
however that ends: its standard input is a pipe that nobody writes to and that closes with us.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import attrs

from crossdock.errors import CrossdockError, RankLost, RuntimeFault, UsageError

END_GRACE_S = 3.0
"""How long the other ranks may take to end after the first failure before they are killed."""


@attrs.frozen(kw_only=True)
class RankError:
    """Why a rank ended, as it wrote it down itself."""

    exit_code: int
    message: str


def error_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its ``RankError``."""
    return folder / f"error_{rank}.json"


def write_error(folder: Path, rank: int, error: BaseException) -> int:
    """Called by the rank that ends; returns its exit code."""
    code = error.exit_code if isinstance(error, CrossdockError) else 1
    message = str(error) if isinstance(error, CrossdockError) else f"unexpected {type(error).__name__}: {error}"
    error_file(folder, rank).write_text(json.dumps({"exit_code": code, "message": message}), encoding="utf-8")
    return code


def end_with_parent() -> None:
    """Called by a rank at its start: it ends as soon as its standard input closes."""

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent watch").start()


def run_local_ranks(module: str, folder: Path, ranks: int, threads: int) -> None:
    """Runs ``python -m module FOLDER RANK`` for every rank and returns when all have ended well.

    Args:
        module: reads its job from ``folder`` and calls ``end_with_parent`` and, when it fails, ``write_error``.
        folder: for the job, results, errors and one log a rank.
        ranks: processes to start.
        threads: compute threads of each.

    Raises:
        UsageError, RuntimeFault: what the first rank to fail wrote down; the others were ended.
        RankLost: a rank ended without a word, for instance killed by a signal.
    """
    processes: list[subprocess.Popen[bytes]] = []
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    try:
        for rank in range(ranks):
            process = _start(module, folder, rank, threads)
            processes.append(process)
            threading.Thread(target=_report_end, args=(process, rank, ended), daemon=True).start()
        for _ in range(ranks):
            rank = ended.get()
            if processes[rank].returncode != 0:
                raise _error_of(folder, rank, processes[rank].returncode)
    finally:
        _end(processes)


def _start(module: str, folder: Path, rank: int, threads: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with (folder / f"rank_{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(folder), str(rank)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
        )


def _report_end(process: subprocess.Popen[bytes], rank: int, ended: queue.SimpleQueue[int]) -> None:
    process.wait()
    ended.put(rank)


def _error_of(folder: Path, rank: int, return_code: int) -> CrossdockError:
    try:
        written = json.loads(error_file(folder, rank).read_text(encoding="utf-8"))
        error = RankError(exit_code=int(written["exit_code"]), message=str(written["message"]))
    except (OSError, ValueError, KeyError):
        return RankLost(f"rank {rank} {_how(return_code)}{_last_line(folder, rank)}", rank=rank)
    kind = UsageError if error.exit_code == UsageError.exit_code else RuntimeFault
    return kind(error.message)


def _how(return_code: int) -> str:
    if return_code < 0:
        return f"was ended by signal {signal.Signals(-return_code).name}"
    return f"ended with exit code {return_code}"


def _last_line(folder: Path, rank: int) -> str:
    lines = (folder / f"rank_{rank}.log").read_text(encoding="utf-8", errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return f"; its last words: {said[-1]}" if said else ""


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends what still runs: politely, then not."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()
