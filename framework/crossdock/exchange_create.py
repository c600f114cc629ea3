"""Chooses and opens how ranks reach each other outside the device: leaders among themselves, and each leader and its peers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from crossdock.comm import RankComms
from crossdock.comm_gloo import GlooComm, c10d
from crossdock.errors import SelectionRefused
from crossdock.exchange import OneReplica, StepExchange, StoreNotice
from crossdock.exchange_gloo import GlooExchange
from crossdock.exchange_shared import SharedMemoryExchange, SharedTable, table_bytes
from crossdock.groups import leader_ranks
from crossdock.peer_channel import GlooPeerChannel, PeerChannel, SharedPeerChannel, channel_bytes
from crossdock.shared_memory import machine_name, share_memory
from crossdock.types.parallel import ParallelSizes, RankPlace

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Transport: TypeAlias = Literal["auto", "shm", "gloo"]
PEER_PATIENCE = 2.0
"""A peer waits longer than its leader may wait for other leaders, so that the error names the rank that is missing there."""


def create_exchange(
    *,
    sizes: ParallelSizes,
    place: RankPlace,
    comms: RankComms,
    store: Store | None,
    transport: Transport = "auto",
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
    notice = None if store is None else StoreNotice(store)
    memory = None
    if transport != "gloo":
        memory = share_memory(comms.host.world, table_bytes(sizes.attn_dp_size), machine or machine_name())
        if memory is None and transport == "shm":
            raise _no_shared_memory()
    if memory is not None:
        table = SharedTable.over(memory, sizes.attn_dp_size)
        if not is_leader:
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


def create_peer_channel(
    *,
    comms: RankComms,
    store: Store | None,
    transport: Transport = "auto",
    timeout_s: float,
    machine: str | None = None,
) -> PeerChannel | None:
    """This rank's end of the channel between its replica's leader and the others; None without attention TP. Collective.

    Raises:
        SelectionRefused: ``shm_needs_one_machine``, on all ranks of the replica.
    """
    attn_tp = comms.host.attn_tp
    if not isinstance(attn_tp, GlooComm):
        return None
    notice = None if store is None else StoreNotice(store)
    patience_s = timeout_s * PEER_PATIENCE
    if transport != "gloo":
        memory = share_memory(attn_tp, channel_bytes(attn_tp.size), machine or machine_name())
        if memory is not None:
            return SharedPeerChannel(
                memory=memory, ranks=attn_tp.ranks, index=attn_tp.rank, timeout_s=patience_s, notice=notice
            )
        if transport == "shm":
            raise _no_shared_memory()
    return GlooPeerChannel(comm=attn_tp, timeout_s=patience_s, notice=notice)


def _no_shared_memory() -> SelectionRefused:
    return SelectionRefused(
        ["shm_needs_one_machine"],
        ["launch.exchange 'shm' needs all ranks on one x86 machine, in one process namespace: use 'gloo'"],
    )
