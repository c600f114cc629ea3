"""Rank processes: an exit is seen at once, the culprit is found, nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from crossdock.launch.supervisor import RankCommand, RankExit, Supervisor, culprit, signal_name

pytestmark = pytest.mark.timeout(60)
WAIT = "import threading; threading.Event().wait()"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAIT}"
PARENT = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {WAIT!r}]).pid, flush=True); {WAIT}"


def run(codes: list[str], scenario: Callable[[Supervisor], Awaitable[None]]) -> None:
    async def limited() -> None:
        commands = [
            RankCommand(rank=rank, argv=(sys.executable, "-c", code), environment=os.environ)
            for rank, code in enumerate(codes)
        ]
        supervisor = Supervisor(commands=commands)
        await supervisor.start()
        try:
            async with asyncio.timeout(30):
                await scenario(supervisor)
        finally:
            supervisor.kill()
            await supervisor.all_exited(5)
        assert not supervisor.alive

    asyncio.run(limited())


def exited(rank: int, returncode: int) -> RankExit:
    return RankExit(rank=rank, pid=100 + rank, returncode=returncode)


def test_the_exit_of_one_rank_is_reported_with_its_code() -> None:
    async def scenario(supervisor: Supervisor) -> None:
        ended = await supervisor.first_exit()
        assert (ended.rank, ended.returncode) == (1, 3)
        assert ended.sentence == f"rank 1 (pid {supervisor.pids[1]}) ended with exit code 3"
        assert supervisor.alive == (0,)

    run([WAIT, "raise SystemExit(3)"], scenario)


def test_a_killed_rank_is_the_culprit_although_its_peer_was_seen_first() -> None:
    assert culprit([exited(0, 1), exited(1, -9), exited(2, 1)]).rank == 1
    assert culprit([exited(2, 1), exited(0, 1)]).rank == 2
    assert exited(1, -9).sentence == "rank 1 (pid 101) was killed by SIGKILL"
    assert signal_name(99) == "signal 99"


@pytest.mark.parametrize("how", ["deaf to SIGTERM", "stopped"])
def test_stop_ends_ranks_that_do_not_listen(how: str) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        if how == "stopped":
            psutil.Process(supervisor.pids[0]).suspend()
        await supervisor.stop(terminate_s=0.2)
        assert not supervisor.alive

    run([DEAF if how == "deaf to SIGTERM" else WAIT, WAIT], scenario)


def test_children_of_ranks_are_ended_too() -> None:
    async def scenario(supervisor: Supervisor) -> None:
        rank = psutil.Process(supervisor.pids[0])
        while not rank.children():
            await asyncio.sleep(0.01)
        (child,) = rank.children()
        await supervisor.stop(terminate_s=0.2)
        child.wait(5)

    run([PARENT], scenario)


def test_ranks_have_a_process_group_of_their_own() -> None:
    async def scenario(supervisor: Supervisor) -> None:
        groups = {os.getpgid(pid) for pid in supervisor.pids.values()}
        assert groups == set(supervisor.pids.values())
        assert os.getpgid(0) not in groups

    run([WAIT, WAIT], scenario)


def test_waiting_for_all_ends_when_they_have_and_says_so_when_not() -> None:
    async def all_end(supervisor: Supervisor) -> None:
        assert await supervisor.all_exited(20)
        assert [one.returncode for one in supervisor.exits] == [0, 0]

    async def one_stays(supervisor: Supervisor) -> None:
        assert not await supervisor.all_exited(0.05)

    run(["pass", "pass"], all_end)
    run([WAIT], one_stays)


def catches(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_a_rank_that_hangs_shows_where_it_is_and_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    hangs = f"import faulthandler, signal; faulthandler.register(signal.SIGUSR1)\ndef a_place(): {WAIT}\na_place()"

    async def scenario(supervisor: Supervisor) -> None:
        while not catches(supervisor.pids[1], signal.SIGUSR1):
            await asyncio.sleep(0.01)
        await supervisor.show_stacks({1, None, 7})
        assert supervisor.alive == (0, 1)

    run([WAIT, hangs], scenario)
    assert "in a_place" in capfd.readouterr().err
