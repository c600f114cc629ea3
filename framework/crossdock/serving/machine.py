"""A later machine of a job: starts its share of the ranks, reports their exits to machine 0, ends when machine 0 does."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path

import attrs
import zmq
import zmq.asyncio

from crossdock.config import Config
from crossdock.errors import RankLost
from crossdock.launch.rendezvous import StoreAddress
from crossdock.launch.runtime_folder import make_runtime_folder
from crossdock.launch.supervisor import RankExit, Supervisor
from crossdock.serving.job import JoinInfo, joined_info, local_rank_range, rank_commands
from crossdock.serving.link_keys import link_keys, read_link_secret
from crossdock.serving.messages import encode_message
from crossdock.serving.rank_link import LINGER_MS, connect_dealer
from crossdock.serving.signals import Signals
from crossdock.serving.start_lines import say
from crossdock.types.link import Fatal

STOP_S = 10.0


async def run_machine(config: Config) -> int:
    """Runs this machine's ranks until the job ends. Returns 0 when all of them ended in order.

    Raises:
        RankLost: a rank of this machine ended on its own, or machine 0 went away.
        RuntimeFault: machine 0 did not come.
    """
    signals = Signals()
    with signals.handled():
        say(f"machine {config.launch.node_rank}: waiting for machine 0 at {config.launch.rdzv_endpoint}")
        address, info = await joined_info(config)
        folder = make_runtime_folder()
        try:
            return await _run_ranks(config, address, info, folder, signals)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


async def _run_ranks(config: Config, address: StoreAddress, info: JoinInfo, folder: Path, signals: Signals) -> int:
    secret = read_link_secret(Path(config.launch.link_key_file)) if info.link_secret is None else info.link_secret
    ranks = local_rank_range(config)
    supervisor = Supervisor(
        commands=rank_commands(
            config,
            ranks,
            folder=folder,
            store=address,
            link_endpoint=info.link_endpoint,
            secret=secret,
        )
    )
    link = _connect(config.launch.node_rank, info.link_endpoint, secret)
    try:
        await supervisor.start()
        say(f"machine {config.launch.node_rank}: ranks {ranks.start} to {ranks.stop - 1} started")
        return await _until_end(config, supervisor, link, signals)
    finally:
        await supervisor.stop()
        link.close()


async def _until_end(config: Config, supervisor: Supervisor, link: MachineLink, signals: Signals) -> int:
    """The first of: all ranks ended, a rank's fault, machine 0 gone, a signal."""
    exited = asyncio.create_task(supervisor.first_exit())
    gone = asyncio.create_task(link.until_gone())
    signalled = asyncio.create_task(signals.first())
    tasks: set[asyncio.Task[RankExit] | asyncio.Task[None]] = {exited, gone, signalled}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if exited in done:
            return await _after_exit(config, supervisor, link, exited.result())
        if gone in done and signalled not in done:
            with contextlib.suppress(TimeoutError):  # an ordered end closes the link when its own ranks are through
                if await supervisor.all_exited(STOP_S) and all(one.returncode == 0 for one in supervisor.exits):
                    return 0
            raise RankLost("machine 0 went away; the ranks of this machine were ended")
        await link.report(min(supervisor.alive, default=0), "its machine was told to stop by a signal")
        return 128 + signals.received[0]
    finally:
        for task in tasks:
            task.cancel()


async def _after_exit(config: Config, supervisor: Supervisor, link: MachineLink, ended: RankExit) -> int:
    if ended.returncode == 0 and await supervisor.all_exited(STOP_S):
        ended = next((one for one in supervisor.exits if one.returncode != 0), ended)
        if ended.returncode == 0:
            return 0
    if ended.was_killed:
        await link.report(ended.rank, f"{ended.sentence} on machine {config.launch.node_rank}")
    raise RankLost(f"{ended.sentence}; all ranks were ended", rank=ended.rank)


@attrs.frozen(kw_only=True, eq=False)
class MachineLink:
    """The supervisor's own end of the link: reports exits, and learns of machine 0's end by the connection."""

    _context: zmq.asyncio.Context = attrs.field(alias="context")
    _socket: zmq.asyncio.Socket = attrs.field(alias="socket")
    _monitor: zmq.asyncio.Socket = attrs.field(alias="monitor")

    async def report(self, rank: int, sentence: str) -> None:
        """Tells machine 0 that ``rank`` is the cause of the job's end."""
        await self._socket.send_multipart(encode_message(Fatal(rank=rank, message=sentence, culprit_rank=rank)))

    async def until_gone(self) -> None:
        """Waits until the connection to machine 0 breaks."""
        await self._monitor.recv_multipart()

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=LINGER_MS)
        self._context.term()


def _connect(node_rank: int, endpoint: str, secret: str) -> MachineLink:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    connect_dealer(socket, b"machine-%d" % node_rank, endpoint, link_keys(secret))
    return MachineLink(context=context, socket=socket, monitor=monitor)
