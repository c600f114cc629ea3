"""Ranks that torchrun, or a scheduler with the same variables, has started: rank 0's process has the server, the others are ranks."""

from __future__ import annotations

import os
import shutil
import sys

import attrs
import msgspec

from crossdock.config import Config
from crossdock.errors import RuntimeFault
from crossdock.launch.rendezvous import StoreAddress, bind_store_socket, join_store
from crossdock.launch.runtime_folder import make_runtime_folder
from crossdock.launch.supervisor import Supervisor
from crossdock.launch.torchrun import TorchrunEnvironment, read_torchrun_environment
from crossdock.serving.frontend_link import bind_ipc_link, bind_tcp_link
from crossdock.serving.job import RANK_MODULE, Job, JoinInfo, rank_commands
from crossdock.serving.link_keys import drawn_link_secret, link_keys
from crossdock.serving.rank_spec import RankSpec, config_json, write_rank_spec


def torchrun_place(config: Config) -> TorchrunEnvironment:
    """This process's place; raises ``ConfigValueError`` when it was not started by torchrun."""
    return read_torchrun_environment(os.environ, expected_ranks=config.parallel.ranks)


def make_torchrun_job(config: Config, place: TorchrunEnvironment) -> Job:
    """Rank 0's job: one rank as a child of this process, the others come by themselves and find the link in the store.

    Raises:
        RuntimeFault: no agent keeps a store and the master port is in use.
    """
    folder = make_runtime_folder()
    is_one_machine = place.local_ranks == place.ranks
    secret = None if is_one_machine else drawn_link_secret()
    try:
        listener = None if place.agent_hosts_store else bind_store_socket(place.master_addr, place.master_port)
        link = (
            bind_ipc_link(folder)
            if secret is None
            else bind_tcp_link(place.master_addr, place.master_addr, link_keys(secret))
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    address = store_address(place)
    commands = rank_commands(
        config,
        range(1),
        folder=folder,
        store=address,
        link_endpoint=link.endpoint,
        secret=secret,
        local_ranks=place.local_ranks,
    )
    info = JoinInfo(run_id=address.prefix, link_endpoint=link.endpoint, link_secret=secret)
    return Job(
        folder=folder,
        link=link,
        supervisor=Supervisor(commands=commands),
        listener=listener,
        join_info=info,
        join_key=join_key(place),
        joined_store=address if place.agent_hosts_store else None,
    )


def become_rank(config: Config, place: TorchrunEnvironment) -> None:
    """Turns this process into its rank: waits for rank 0's link, then replaces the program. Returns only by an error.

    Raises:
        RuntimeFault: rank 0 published no link in time.
    """
    address = store_address(place)
    store = join_store(address, config.launch.start_timeout_s)
    try:
        info = msgspec.json.decode(store.get(join_key(place)), type=JoinInfo)
    except RuntimeError as error:
        raise RuntimeFault(f"rank 0 published no link: {error}") from error
    folder = make_runtime_folder()
    spec = RankSpec(
        rank=place.rank,
        local_rank=place.local_rank,
        store=attrs.evolve(address, prefix=info.run_id),
        link_endpoint=info.link_endpoint,
        link_secret=info.link_secret,
        parent_pid=os.getppid(),
        config_json=config_json(config),
    )
    path = write_rank_spec(folder, spec)
    os.execv(sys.executable, [sys.executable, "-m", RANK_MODULE, str(path)])


def store_address(place: TorchrunEnvironment) -> StoreAddress:
    """The store on the master port, with the keys of this job and attempt."""
    return StoreAddress(
        host=place.master_addr, port=place.master_port, prefix=f"crossdock-{place.run_id}-{place.attempt}"
    )


def join_key(place: TorchrunEnvironment) -> str:
    """Where rank 0 publishes its link; a restarted attempt must not find the old one."""
    return f"crossdock/join/{place.run_id}/{place.attempt}"
