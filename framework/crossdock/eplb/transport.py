"""How ranks talk for live balancing: what carries experts, and where they vote."""

from __future__ import annotations

from crossdock.comm import RankComms
from crossdock.comm_shared import PairMemory, SharedComm, group_bytes
from crossdock.eplb.transfer import LocalCarrier, SliceCarrier
from crossdock.eplb.transfer_gloo import GlooCarrier
from crossdock.eplb.transfer_nccl import NcclCarrier
from crossdock.groups import GroupAxis, group_ranks
from crossdock.rank_plan import RankPlan
from crossdock.shared_memory import machine_name, share_memory
from crossdock.types.comm import GroupComm


def make_carrier(plan: RankPlan, comms: RankComms) -> SliceCarrier:
    """Of this rank's expert group; every rank calls it."""
    if plan.sizes.moe_ep_size == 1:
        return LocalCarrier()
    partition = group_ranks(plan.sizes, GroupAxis.MOE_EP)
    # Longer than a move may take, so that lateness is found by the vote and not by the library.
    timeout_s = max(30.0, 4 * plan.config.eplb.late_s)
    over_nccl = plan.config.launch.device == "cuda" and plan.config.eplb.transport == "auto"
    return (NcclCarrier if over_nccl else GlooCarrier)(comms.moe_ep.ranks, partition, timeout_s=timeout_s)


def voting_group(plan: RankPlan, comms: RankComms) -> GroupComm:
    """For a few bytes a step: shared memory beside GPUs of one machine, at a tenth of gloo's cost. Ranks that compute on the processor
    use gloo, which sleeps where shared memory would wait actively."""
    world = comms.host.world
    if plan.config.launch.device == "cpu" or world.size == 1:
        return world
    memory = share_memory(world, group_bytes(world.size), machine_name())
    if memory is None:
        return world
    return SharedComm(ranks=world.ranks, rank=world.rank, memory=PairMemory.over(memory, world.size))
