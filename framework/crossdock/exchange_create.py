"""Chooses and opens the exchange of a job; every rank takes part, leaders get an end."""

from __future__ import annotations

import socket
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from crossdock.comm import RankComms
from crossdock.comm_gloo import c10d
from crossdock.errors import SelectionRefused
from crossdock.exchange import OneReplica, StepExchange, StoreNotice
from crossdock.exchange_gloo import GlooExchange
from crossdock.exchange_shared import SharedMemoryExchange, SharedTable, create_table
from crossdock.groups import leader_ranks
from crossdock.types.parallel import ParallelSizes, RankPlace

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PATH_BYTES = 512


def create_exchange(
    *,
    sizes: ParallelSizes,
    place: RankPlace,
    comms: RankComms,
    store: Store | None,
    transport: Literal["auto", "shm", "gloo"] = "auto",
    timeout_s: float,
    machine: str | None = None,
) -> StepExchange | None:
    """This leader's end of the exchange; None on attention-TP peers. Collective over all ranks.

    Args:
        store: of the process group; where notices to stop are left. Needed for gloo.
        transport: ``auto``: shared memory where all ranks are on one machine and can open it, else gloo.
        timeout_s: a replica that does not arrive within so long ends the job.
        machine: name of this rank's machine; by default host name and boot.

    Raises:
        SelectionRefused: ``shm_needs_one_machine``, on all ranks.
    """
    leaders = leader_ranks(sizes)
    is_leader = place.rank in leaders
    if sizes.attn_dp_size == 1:
        return OneReplica() if is_leader else None
    is_shared, table = False, None
    if transport != "gloo":
        is_shared, table = _open_shared(sizes, place, comms, machine or machine_name(), is_leader=is_leader)
        if not is_shared and transport == "shm":
            raise SelectionRefused(
                ["shm_needs_one_machine"],
                ["launch.exchange 'shm' needs all ranks on one machine with a common shared-memory folder: use 'gloo'"],
            )
    notice = None if store is None else StoreNotice(store)
    if is_shared:
        if table is None:
            return None
        return SharedMemoryExchange(
            table=table, attn_dp_rank=place.attn_dp_rank, leaders=leaders, timeout_s=timeout_s, notice=notice
        )
    group = c10d.new_group(list(leaders), backend="gloo")
    if not is_leader or store is None or notice is None:
        return None
    return GlooExchange(
        group=group,
        store=store,
        attn_dp_rank=place.attn_dp_rank,
        leaders=leaders,
        timeout_s=timeout_s,
        notice=notice,
    )


def machine_name() -> str:
    """Host name and boot: equal for processes that can share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _open_shared(
    sizes: ParallelSizes, place: RankPlace, comms: RankComms, machine: str, *, is_leader: bool
) -> tuple[bool, SharedTable | None]:
    """Whether every leader could open the table, equal on all ranks, and a leader's own. The file is gone afterwards in any case."""
    world = comms.host.world
    machines = world.all_gather(torch.tensor([zlib.crc32(machine.encode())]))
    if int(machines.max()) != int(machines.min()):
        return False, None
    path = _created_path(sizes.attn_dp_size) if place.rank == 0 else b""
    sent = torch.zeros(PATH_BYTES, dtype=torch.uint8)
    sent[: len(path)] = torch.frombuffer(bytearray(path), dtype=torch.uint8) if path else sent[:0]
    received = world.broadcast(sent, 0).numpy().tobytes().rstrip(b"\0")
    table = None
    if is_leader and received:
        try:
            table = SharedTable(path=Path(received.decode()), replicas=sizes.attn_dp_size)
        except OSError:
            table = None
    opened = world.all_gather(torch.tensor([int(table is not None or not is_leader)]))
    if place.rank == 0 and received:
        Path(received.decode()).unlink(missing_ok=True)
    return bool(opened.all()) and bool(received), table


def _created_path(replicas: int) -> bytes:
    """Empty when there is no room for a table."""
    try:
        return str(create_table(replicas)).encode()
    except OSError:
        return b""
