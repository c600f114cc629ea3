"""The server of machine 0 from its start to its end: ranks, HTTP, drain, and one sentence when something breaks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncGenerator, Callable

import attrs
import structlog
from aiohttp import web

from crossdock.config import Config
from crossdock.errors import CrossdockError, RankLost, RuntimeFault, UsageError
from crossdock.launch.supervisor import RankExit
from crossdock.rank_plan import plan_rank
from crossdock.serving.app import make_app
from crossdock.serving.frontend import Frontend, Phase
from crossdock.serving.frontend_build import bind_http_socket, make_frontend
from crossdock.serving.hello import say_hello
from crossdock.serving.http_log import http_logger
from crossdock.serving.job import Job
from crossdock.serving.receipts import write_receipt
from crossdock.serving.signals import Signals
from crossdock.serving.start_lines import StartLines, say
from crossdock.types.link import Outgoing

_LOG = structlog.get_logger("crossdock.server")
STOP_S = 10.0
"""Ranks may take this long to leave their step loop together."""
ABORT_S = 2.0
"""Aborted requests may take this long to be answered."""
HEALTH_TICK_S = 1.0
START_PHASES = 4


async def serve(config: Config, make_job: Callable[[], Job]) -> int:
    """Serves until a signal or a fault. ``make_job`` is called once the HTTP port is taken. Returns the exit code: 0 after a drain, 128 + signal when it was cut short.

    Raises:
        UsageError: configuration, checkpoint or plugins cannot be used; found before or while ranks are started.
        RuntimeFault: a port is in use, a rank was lost, ranks were not ready in time.
    """
    lines = StartLines(total=START_PHASES)
    plan = plan_rank(config, 0)
    listener = bind_http_socket(config.server.host, config.server.port)
    signals = Signals()
    with contextlib.closing(listener), signals.handled():
        chosen = ", ".join(f"{plugin.point} {plugin.name}" for plugin in plan.selection.plugins)
        lines.done(f"configuration and plugins: {chosen}")
        job = make_job()
        try:
            frontend = make_frontend(config, plan, job.link)
            server = Server(config=config, frontend=frontend, job=job, signals=signals, lines=lines)
            return await server.run(listener)
        finally:
            await job.close()


@attrs.define(kw_only=True, eq=False)
class Server:
    """A running server; ``run`` is its life."""

    config: Config
    frontend: Frontend
    job: Job
    signals: Signals
    lines: StartLines

    async def run(self, listener: socket.socket) -> int:
        """Starts, serves, and ends in order. Raises and returns as ``serve``."""
        async with self._http(listener), self._background():
            url = _url(listener)
            await self.job.start()
            self.frontend.info["pids"] = {str(rank): pid for rank, pid in self.job.supervisor.pids.items()}
            self.lines.done(f"rank processes started ({len(self.job.supervisor.pids)} here), HTTP on {url}")
            try:
                if not await self._until_ready():
                    return 128 + self.signals.received[0]
                return await self._serve(url)
            except CrossdockError:
                faults = self.frontend.engine.faults
                await self.job.supervisor.show_stacks({fatal.culprit_rank for fatal in faults.fatals})
                # Before the HTTP server closes its connections: the other ranks must not go on meanwhile.
                await self.job.supervisor.stop()
                raise

    async def _serve(self, url: str) -> int:
        self.frontend.phase = Phase.READY
        self.lines.done("ranks joined, weights loaded")
        hello = asyncio.create_task(say_hello(self.frontend, url, self.lines))
        try:
            await self._until_end()
            return await self._drain()
        finally:
            hello.cancel()

    async def _until_ready(self) -> bool:
        """False when a signal came first. Raises when a rank ends or time is up."""
        timeout_s = self.config.launch.start_timeout_s
        ready = asyncio.create_task(self.frontend.engine.wait_ready())
        done = await self._first_of(ready, timeout_s=timeout_s)
        if done is ready:
            await self._check(ready)
            return True
        if done is None:
            missing = sorted(set(range(self.config.parallel.ranks)) - set(self.frontend.engine.ready))
            raise RuntimeFault(
                f"ranks {missing} were not ready within {timeout_s:g} s (launch.start_timeout_s); see their logs"
            )
        return False

    async def _until_end(self) -> None:
        """Until a signal. Raises ``RankLost`` when a rank ends or the engine fails."""
        failed = asyncio.create_task(self.frontend.engine.faults.wait())
        if await self._first_of(failed, timeout_s=None) is failed:
            await self._check(failed)

    async def _first_of(self, task: asyncio.Task[None], *, timeout_s: float | None) -> asyncio.Task[None] | None:
        """The first of ``task`` and the first signal; a rank's exit raises. None: time is up."""
        exited = asyncio.create_task(self.job.supervisor.first_exit())
        signalled = asyncio.create_task(self.signals.first())
        tasks: set[asyncio.Task[None] | asyncio.Task[RankExit]] = {task, exited, signalled}
        try:
            done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if signalled in done:
                return signalled
            if exited in done:
                raise self._lost(exited.result())
            return task if task in done else None
        finally:
            for one in tasks:
                if not one.done():
                    one.cancel()

    async def _check(self, task: asyncio.Task[None]) -> None:
        """Raises the reason for the engine's failure, waiting a moment for the exit that tells more."""
        if task.exception() is None and self.frontend.engine.failure is None:
            return
        with contextlib.suppress(TimeoutError):
            raise self._lost(await asyncio.wait_for(self.job.supervisor.first_exit(), ABORT_S))
        raise self._failed(self.frontend.engine.faults.cause or str(task.exception()), rank=None)

    def _lost(self, ended: RankExit) -> CrossdockError:
        """The error for the exit of a rank: what the ranks themselves said tells more than an exit code."""
        said = self.frontend.engine.faults.cause
        return self._failed(ended.sentence if ended.was_killed or said is None else said, rank=ended.rank)

    def _failed(self, reason: str, *, rank: int | None) -> CrossdockError:
        self._fail(reason)
        if self.frontend.engine.faults.has_wrong_input:
            return UsageError(reason)
        return RankLost(f"{reason}; all ranks were ended", rank=rank)

    def _fail(self, reason: str) -> None:
        """Open requests get the reason now, health is red from now on."""
        self.frontend.phase = Phase.FAILED
        self.frontend.engine.fail(reason)

    async def _drain(self) -> int:
        """Lets requests finish, aborts what is left, stops the ranks. A second signal cuts it short."""
        forced = asyncio.create_task(self.signals.second())
        drained = asyncio.create_task(self._drain_in_order())
        await asyncio.wait({forced, drained}, return_when=asyncio.FIRST_COMPLETED)
        if not drained.done():
            drained.cancel()
            self.job.supervisor.kill()
            return 128 + forced.result()
        forced.cancel()
        drained.result()
        return 0

    async def _drain_in_order(self) -> None:
        frontend = self.frontend
        frontend.phase = Phase.DRAINING
        drain_s = self.config.server.drain_s
        if frontend.active:
            say(f"draining: {len(frontend.active)} requests may finish within {drain_s:g} s; a second signal ends now")
        await self._until_idle(drain_s)
        if frontend.active:
            aborted = await frontend.engine.abort_matching(None)
            say(f"drain time is over: {aborted} sequences aborted")
            await self._until_idle(ABORT_S)
        await write_receipt(frontend, self.config.server.receipt_file)
        await frontend.engine.stop()
        if not await self.job.supervisor.all_exited(STOP_S):
            say(f"ranks {list(self.job.supervisor.alive)} did not stop within {STOP_S:g} s and are ended")

    async def _until_idle(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while self.frontend.active and time.monotonic() < end and self.frontend.engine.failure is None:
            await asyncio.sleep(0.02)

    @contextlib.asynccontextmanager
    async def _http(self, listener: socket.socket) -> AsyncGenerator[None]:
        # handler_cancellation: a client that hangs up cancels its handler, which aborts its sequences.
        runner = web.AppRunner(
            make_app(self.frontend),
            handler_cancellation=True,
            access_log=None,
            logger=http_logger(),
            shutdown_timeout=ABORT_S,
        )
        await runner.setup()
        try:
            await web.SockSite(runner, listener).start()
            yield
        finally:
            await runner.cleanup()

    @contextlib.asynccontextmanager
    async def _background(self) -> AsyncGenerator[None]:
        tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch_health())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self) -> None:
        def bad(error: Exception) -> None:
            _LOG.error("message dropped", reason=str(error))

        async for message in self.job.link.messages(bad):
            await self._take(message)

    async def _take(self, message: Outgoing) -> None:
        try:
            await self.frontend.engine.receive(message)
        except Exception:  # noqa: BLE001 - one message must not end the link of all requests
            _LOG.exception("message not handled", message=type(message).__name__)

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_TICK_S)
            self.frontend.engine.check_progress(self.config.server.stuck_after_s)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
