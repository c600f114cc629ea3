"""A job's rank processes on one machine, with what they need: a private folder, the rendezvous and the link."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import msgspec

from crossdock.config import Config
from crossdock.errors import RuntimeFault
from crossdock.launch.rendezvous import StoreAddress, bind_store_socket, host_store, join_store, parse_endpoint
from crossdock.launch.runtime_folder import make_runtime_folder
from crossdock.launch.supervisor import RankCommand, Supervisor
from crossdock.serving.frontend_link import FrontendLink, bind_ipc_link, bind_tcp_link
from crossdock.serving.link_keys import drawn_link_secret, link_keys, read_link_secret
from crossdock.serving.rank_spec import RankSpec, config_json, write_rank_spec

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

RANK_MODULE = "crossdock.serving.rank_main"
JOIN_KEY = "crossdock/join"
STORE_JOIN_S = 60.0


@attrs.frozen(kw_only=True)
class JoinInfo:
    """What machine 0 tells the others through the store."""

    run_id: str
    link_endpoint: str
    link_secret: str | None = attrs.field(repr=False)
    """None when a key file holds it."""


@attrs.define(kw_only=True, eq=False)
class Job:
    """Machine 0's side. ``close`` leaves nothing behind."""

    folder: Path
    link: FrontendLink
    supervisor: Supervisor
    listener: socket.socket | None
    """Bound socket of the store; None for one rank, which meets nobody."""
    join_info: JoinInfo
    join_key: str = JOIN_KEY
    joined_store: StoreAddress | None = None
    """A store that somebody else serves, where there is one."""
    store: TCPStore | None = attrs.field(default=None, init=False)

    async def start(self) -> None:
        """Starts the ranks of this machine, then serves the store: the ranks import torch in the meantime."""
        await self.supervisor.start()
        if self.listener is not None:
            self.store = await asyncio.to_thread(host_store, self.listener)
        elif self.joined_store is not None:
            self.store = await asyncio.to_thread(join_store, self.joined_store, STORE_JOIN_S)
        if self.store is not None:
            self.store.set(self.join_key, msgspec.json.encode(self.join_info).decode())

    async def close(self) -> None:
        """Ends the ranks that are left and removes socket, store and folder."""
        await self.supervisor.stop()
        self.link.close()
        self.store = None
        if self.listener is not None:
            self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def local_rank_range(config: Config) -> range:
    """The ranks of this machine: machines hold equal shares in order (``config_rules`` has checked that they divide)."""
    launch = config.launch
    share = config.parallel.ranks // launch.nnodes
    return range(launch.node_rank * share, (launch.node_rank + 1) * share)


def make_job(config: Config) -> Job:
    """Binds everything that must be bound before anybody is told of it, and prepares machine 0's ranks.

    Raises:
        ConfigError: widths, endpoint or key file cannot be used.
        RuntimeFault: a port is in use.
    """
    ranks = local_rank_range(config)
    is_alone = config.launch.nnodes == 1
    host, port = ("127.0.0.1", 0) if is_alone else parse_endpoint(config.launch.rdzv_endpoint)
    secret = None if is_alone else link_secret(config)
    folder = make_runtime_folder()
    try:
        listener = bind_store_socket(host, port) if config.parallel.ranks > 1 else None
        link = bind_ipc_link(folder) if secret is None else bind_tcp_link(host, host, link_keys(secret))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    run_id = f"crossdock-{secrets.token_hex(8)}"
    address = StoreAddress(host=host, port=0 if listener is None else listener.getsockname()[1], prefix=run_id)
    has_key_file = bool(config.launch.link_key_file)
    info = JoinInfo(run_id=run_id, link_endpoint=link.endpoint, link_secret=None if has_key_file else secret)
    commands = rank_commands(config, ranks, folder=folder, store=address, link_endpoint=link.endpoint, secret=secret)
    return Job(folder=folder, link=link, supervisor=Supervisor(commands=commands), listener=listener, join_info=info)


def link_secret(config: Config) -> str:
    """The secret of the link between machines: from the key file, else a fresh one."""
    path = config.launch.link_key_file
    return read_link_secret(Path(path)) if path else drawn_link_secret()


async def joined_info(config: Config) -> tuple[StoreAddress, JoinInfo]:
    """A later machine's side: waits for machine 0 and reads what it published.

    Raises:
        RuntimeFault: machine 0 did not come within ``launch.start_timeout_s``.
    """
    host, port = parse_endpoint(config.launch.rdzv_endpoint)
    timeout_s = config.launch.start_timeout_s
    store = await asyncio.to_thread(join_store, StoreAddress(host=host, port=port), timeout_s)
    try:
        data = await asyncio.to_thread(store.get, JOIN_KEY)
    except RuntimeError as error:
        raise RuntimeFault(f"machine 0 at {host} port {port} published no link: {error}") from error
    info = msgspec.json.decode(data, type=JoinInfo)
    return StoreAddress(host=host, port=port, prefix=info.run_id), info


def rank_commands(
    config: Config,
    ranks: range,
    *,
    folder: Path,
    store: StoreAddress,
    link_endpoint: str,
    secret: str | None,
    local_ranks: int | None = None,
) -> list[RankCommand]:
    """Commands that start ``ranks`` on this machine; writes a start file for each into ``folder``.

    ``local_ranks`` is how many share the machine's cores, when it is not just ``ranks``.
    """
    environment = rank_environment(config, local_ranks or len(ranks))
    commands: list[RankCommand] = []
    for local_rank, rank in enumerate(ranks):
        spec = RankSpec(
            rank=rank,
            local_rank=local_rank,
            store=store,
            link_endpoint=link_endpoint,
            link_secret=secret,
            parent_pid=os.getpid(),
            log_file=log_file(config, rank),
            config_json=config_json(config),
        )
        path = write_rank_spec(folder, spec)
        commands.append(
            RankCommand(rank=rank, argv=(sys.executable, "-m", RANK_MODULE, str(path)), environment=environment)
        )
    return commands


def log_file(config: Config, rank: int) -> str | None:
    """Where a rank logs; None for stderr."""
    return str(Path(config.launch.log_folder) / f"rank-{rank}.log") if config.launch.log_folder else None


def rank_environment(config: Config, local_ranks: int) -> Mapping[str, str]:
    """The environment of a rank: threads must be set before torch starts, and so must huge pages."""
    threads = config.launch.threads_per_rank or max(1, (os.cpu_count() or 1) // local_ranks)
    # Transparent huge pages are worth 1.5 times of read bandwidth where the system's setting is madvise.
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "THP_MEM_ALLOC_ENABLE": "1",
    }
