"""How ranks talk for live balancing: what carries experts, and where they vote."""

from __future__ import annotations

import zlib

import torch

from crossdock.comm import RankComms
from crossdock.comm_nccl import NcclComm
from crossdock.comm_shared import PairMemory, SharedComm, group_bytes
from crossdock.eplb.ballot import Ballot, GatheredBallot
from crossdock.eplb.ballot_shared import SharedBallot, board_bytes
from crossdock.eplb.spare_slots import SpareSlots
from crossdock.eplb.transfer import LocalCarrier, SliceCarrier
from crossdock.eplb.transfer_files import FileCarrier
from crossdock.eplb.transfer_gloo import GlooCarrier
from crossdock.eplb.transfer_nccl import NcclCarrier
from crossdock.eplb.transfer_peer import PeerCarrier, peer_memory
from crossdock.eplb.transfer_shared import SharedCarrier, share_spare_slots
from crossdock.errors import ConfigValueError
from crossdock.groups import GroupAxis, group_ranks
from crossdock.rank_plan import RankPlan
from crossdock.shared_memory import machine_name, share_memory
from crossdock.types.comm import GroupComm


def writes_to_peers(plan: RankPlan) -> bool:
    """Experts go straight into the memory of other GPUs, if these can map it; decided before there are groups."""
    launch, eplb = plan.config.launch, plan.config.eplb
    is_wanted = eplb.transport == "peer" or (eplb.transport == "auto" and launch.nnodes == 1)
    return launch.device == "cuda" and plan.sizes.moe_ep_size > 1 and eplb.experts_from == "peers" and is_wanted


def make_carrier(plan: RankPlan, comms: RankComms, spare: SpareSlots) -> SliceCarrier:
    """Of this rank's expert group; every rank calls it.

    Raises:
        ConfigValueError: ``eplb.transport`` is ``peer`` and the ranks cannot map one another's memory, or ``nccl`` without GPUs.
    """
    launch, eplb = plan.config.launch, plan.config.eplb
    if plan.sizes.moe_ep_size == 1:
        return LocalCarrier()
    if eplb.experts_from == "checkpoint":
        return FileCarrier(launch.device)
    if writes_to_peers(plan) and _is_one_machine(comms) and isinstance(comms.moe_ep, NcclComm):
        peers = peer_memory(spare, comms.moe_ep, comms.host.moe_ep)
        if peers is not None:
            return PeerCarrier(peers, comms.host.moe_ep)
    if eplb.transport == "peer":
        raise ConfigValueError(
            ['[eplb] transport: peer needs GPUs of one machine that can map one another\'s memory; set it to "auto"']
        )
    if eplb.transport == "nccl" and launch.device != "cuda":
        raise ConfigValueError(
            [f'[eplb] transport: nccl needs GPUs, and ranks compute on {launch.device}; set it to "auto"']
        )
    if launch.device == "cpu" and eplb.transport == "auto":
        slots = share_spare_slots(spare, comms.host.moe_ep)
        if slots is not None:
            return SharedCarrier(slots)
    partition = group_ranks(plan.sizes, GroupAxis.MOE_EP)
    # Longer than a move may take, so that lateness is found by the vote and not by the library.
    timeout_s = max(30.0, 4 * eplb.late_s)
    over_nccl = launch.device == "cuda" and eplb.transport != "gloo"
    return (NcclCarrier if over_nccl else GlooCarrier)(comms.moe_ep.ranks, partition, timeout_s=timeout_s)


def _is_one_machine(comms: RankComms) -> bool:
    """All ranks of the job; a collective."""
    names = comms.host.world.all_gather(torch.tensor([zlib.crc32(machine_name().encode())]))
    return int(names.max()) == int(names.min())


def voting_group(plan: RankPlan, comms: RankComms) -> GroupComm:
    """For a plan or a reason, host tensors: shared memory beside GPUs of one machine, at a tenth of gloo's cost. Ranks that compute on the
    processor use gloo, which sleeps where shared memory would wait actively."""
    world = comms.host.world
    if plan.config.launch.device == "cpu" or world.size == 1:
        return world
    memory = share_memory(world, group_bytes(world.size), machine_name())
    if memory is None:
        return world
    return SharedComm(ranks=world.ranks, rank=world.rank, memory=PairMemory.over(memory, world.size))


def make_ballot(world: GroupComm) -> Ballot:
    """How the ranks of ``world`` vote: on one machine in shared memory, without a wait. Collective."""
    memory = share_memory(world, board_bytes(world.size), machine_name()) if world.size > 1 else None
    return GatheredBallot(world=world) if memory is None else SharedBallot(world=world, memory=memory)
