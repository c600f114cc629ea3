"""The supervisor of one machine's ranks: starts them, sees an exit at once, ends the others, leaves no process behind."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs
import psutil

CULPRIT_WINDOW_S = 0.3
"""When a rank dies its peers fail in their collectives moments later; exits this close together are judged as one event."""
TERMINATE_S = 1.0
STACKS_S = 0.2
"""A live rank writes its stacks within this time."""


@attrs.frozen(kw_only=True)
class RankCommand:
    """How to start one rank."""

    rank: int
    argv: tuple[str, ...]
    environment: Mapping[str, str] = attrs.field(repr=False)


@attrs.frozen(kw_only=True)
class RankExit:
    """A rank that ended."""

    rank: int
    pid: int
    returncode: int

    @property
    def was_killed(self) -> bool:
        """It ended by a signal: not its own decision, so it is the cause and not a consequence."""
        return self.returncode < 0

    @property
    def sentence(self) -> str:
        """What happened, for a user."""
        if self.was_killed:
            return f"rank {self.rank} (pid {self.pid}) was killed by {signal_name(-self.returncode)}"
        return f"rank {self.rank} (pid {self.pid}) ended with exit code {self.returncode}"


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def culprit(exits: Sequence[RankExit]) -> RankExit:
    """The exit that caused the others: one by a signal before one by an exit code, then the first."""
    return next((one for one in exits if one.was_killed), exits[0])


@attrs.define(kw_only=True, eq=False)
class Supervisor:
    """Owns the rank processes of this machine. Everything runs on one event loop."""

    commands: Sequence[RankCommand]
    exits: list[RankExit] = attrs.field(factory=list[RankExit], init=False)
    """In the order in which they were seen."""
    _processes: dict[int, asyncio.subprocess.Process] = attrs.field(factory=dict, init=False)
    _watchers: list[asyncio.Task[None]] = attrs.field(factory=list, init=False)
    _exited: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)

    async def start(self) -> None:
        """Starts every rank in a process group of its own, so that the terminal's Ctrl-C reaches the supervisor only."""
        for command in self.commands:
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                stdin=asyncio.subprocess.DEVNULL,
                env=dict(command.environment),
                process_group=0,
            )
            self._processes[command.rank] = process
            self._watchers.append(asyncio.create_task(self._watch(command.rank, process)))

    @property
    def pids(self) -> dict[int, int]:
        """Rank to pid."""
        return {rank: process.pid for rank, process in self._processes.items()}

    @property
    def alive(self) -> tuple[int, ...]:
        """Ranks that have not ended."""
        return tuple(rank for rank, process in self._processes.items() if process.returncode is None)

    async def first_exit(self) -> RankExit:
        """Waits until a rank ends, and a moment more for those that it takes along; the culprit."""
        await self._exited.wait()
        await asyncio.sleep(CULPRIT_WINDOW_S)
        return culprit(self.exits)

    async def all_exited(self, timeout_s: float) -> bool:
        """Waits for all ranks to end on their own; False when some are left."""
        if not self._watchers:
            return True
        _, pending = await asyncio.wait(self._watchers, timeout=timeout_s)
        return not pending

    async def show_stacks(self, ranks: Collection[int | None]) -> None:
        """Lets those of ``ranks`` that live write the stacks of their threads to stderr: where a rank hangs that others waited for."""
        shown = [rank for rank in self.alive if rank in ranks]
        self._signal(signal.SIGUSR1, shown)
        if shown:
            await asyncio.sleep(STACKS_S)

    async def stop(self, *, terminate_s: float = TERMINATE_S) -> None:
        """Ends what is left: SIGTERM, then SIGKILL after ``terminate_s``, their children included. Stopped processes too."""
        left = self._family()
        self._signal(signal.SIGTERM, self.alive)
        await self.all_exited(terminate_s)
        self._signal(signal.SIGKILL, self.alive)
        await self.all_exited(terminate_s)
        kill_processes(left)

    def kill(self) -> None:
        """Ends everything now."""
        left = self._family()
        self._signal(signal.SIGKILL, self.alive)
        kill_processes(left)

    def _family(self) -> list[psutil.Process]:
        """Children of the ranks; each remembers its start time, so that a used-again pid is never signalled."""
        family: list[psutil.Process] = []
        for rank in self.alive:
            try:
                family.extend(psutil.Process(self._processes[rank].pid).children(recursive=True))
            except psutil.Error:
                continue
        return family

    def _signal(self, number: signal.Signals, ranks: Iterable[int]) -> None:
        for rank in ranks:
            try:
                self._processes[rank].send_signal(number)
            except ProcessLookupError:
                continue

    async def _watch(self, rank: int, process: asyncio.subprocess.Process) -> None:
        returncode = await process.wait()
        self.exits.append(RankExit(rank=rank, pid=process.pid, returncode=returncode))
        self._exited.set()


def kill_processes(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL to those of ``processes`` that still are what they were."""
    for process in processes:
        try:
            process.kill()
        except psutil.Error:
            continue
