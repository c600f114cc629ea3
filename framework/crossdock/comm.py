"""The groups that a rank belongs to: joined and created once, aliases share one communicator."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import attrs
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from crossdock.comm_gloo import GlooComm, c10d
from crossdock.comm_nccl import NcclComm
from crossdock.comm_shared import PairMemory, SharedComm, group_bytes
from crossdock.errors import ConfigError, MisuseError
from crossdock.groups import GroupAxis, group_ranks
from crossdock.shared_memory import machine_name, share_memory
from crossdock.types.comm import GroupComm, PendingRows
from crossdock.types.parallel import ParallelSizes

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Partition: TypeAlias = tuple[tuple[int, ...], ...]
"""Groups of ranks that tile all ranks."""
COMM_AXES = (GroupAxis.WORLD, GroupAxis.ATTN_TP, GroupAxis.MOE_EP, GroupAxis.MOE_TP)
"""Axes with collectives; attn_cp and moe_dp above 1 are refused at start."""


@attrs.frozen(kw_only=True)
class LocalComm:
    """A group of one rank: every collective is its input."""

    ranks: tuple[int, ...] = (0,)

    @property
    def size(self) -> int:
        return 1

    @property
    def rank(self) -> int:
        return 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gatherv(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return x

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def reduce_scatterv(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return x

    def all_to_all(self, x: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> torch.Tensor:
        return x

    def all_to_all_begin(self, x: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> PendingRows:
        return LocalPendingRows(x)

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        return x


@attrs.frozen(eq=False)
class LocalPendingRows:
    """A collective of one rank, done as it began."""

    rows: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.rows


@attrs.frozen(kw_only=True, eq=False)
class RankComms:
    """``Comms`` of a rank: for tensors on its device, and ``host`` for tensors on the CPU."""

    world: GroupComm
    attn_tp: GroupComm
    moe_ep: GroupComm
    moe_tp: GroupComm
    on_host: RankComms | None = None

    @property
    def host(self) -> RankComms:
        """The same groups for CPU tensors outside the forward pass, over gloo."""
        return self.on_host or self


def local_comms() -> RankComms:
    """Groups of a layout with one rank; needs no process group."""
    only = LocalComm()
    return RankComms(world=only, attn_tp=only, moe_ep=only, moe_tp=only)


def take_device(device_type: str, local_rank: int, ranks_per_gpu: int = 1) -> None:
    """Makes the GPU of this process the current one, before it joins a process group; nothing to do on the CPU.

    Raises:
        ConfigError: torch sees no such GPU here.
    """
    if device_type != "cuda":
        return
    gpu, num_gpus = local_rank // ranks_per_gpu, torch.cuda.device_count()
    if gpu >= num_gpus:
        raise ConfigError(
            f'launch.device = "cuda" needs GPU {gpu} for rank {local_rank} of this machine, and torch {torch.__version__} sees '
            f"{num_gpus}; use --device cpu, fewer ranks, or launch.ranks_per_gpu to let ranks share one"
        )
    torch.cuda.set_device(gpu)
    if ranks_per_gpu > 1:
        # NCCL takes one rank a device of a host. Told that they are on different hosts, ranks go over sockets: slow, and right.
        os.environ["NCCL_HOSTID"] = f"{machine_name()}-{local_rank}"
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"


def join_process_group(*, rank: int, ranks: int, store: Store, device_type: str, timeout_s: float) -> None:
    """Joins torch.distributed's default group: gloo for CPU tensors, and NCCL beside it on GPUs. Every rank calls it once."""
    dist.init_process_group(
        backend="gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def create_comms(
    sizes: ParallelSizes, rank: int, device_type: str = "cpu", transport: Literal["auto", "gloo"] = "auto"
) -> RankComms:
    """The groups of ``rank``. Collective: every rank calls it with the same arguments, after ``join_process_group``.

    Axes with equal groups share one communicator, groups of one rank have none. On the CPU, groups within one machine go through shared
    memory, unless ``transport`` is gloo; ``host`` is gloo always.

    Raises:
        MisuseError: the process group has another number of ranks than the layout.
    """
    if sizes.ranks == 1:
        return local_comms()
    if dist.get_world_size() != sizes.ranks:
        raise MisuseError(f"the layout has {sizes.ranks} ranks, the process group {dist.get_world_size()}")
    gloo: dict[Partition, GroupComm] = {}
    fast: dict[Partition, GroupComm] = {}
    for partition, group in _create_groups(sizes).items():
        members = next(members for members in partition if rank in members)
        if group is None:
            gloo[partition] = fast[partition] = LocalComm(ranks=members)
            continue
        place = members.index(rank)
        gloo[partition] = fast[partition] = host = GlooComm(group=group, ranks=members, rank=place)
        if device_type != "cpu":
            fast[partition] = NcclComm(group=group, ranks=members, rank=place)
        elif transport == "auto":
            memory = share_memory(host, group_bytes(len(members)), machine_name())
            if memory is not None:
                fast[partition] = SharedComm(ranks=members, rank=place, memory=PairMemory.over(memory, len(members)))
    return _rank_comms(sizes, fast, on_host=_rank_comms(sizes, gloo, on_host=None))


def _rank_comms(sizes: ParallelSizes, made: dict[Partition, GroupComm], on_host: RankComms | None) -> RankComms:
    of_axis = {axis: made[group_ranks(sizes, axis)] for axis in COMM_AXES}
    return RankComms(
        world=of_axis[GroupAxis.WORLD],
        attn_tp=of_axis[GroupAxis.ATTN_TP],
        moe_ep=of_axis[GroupAxis.MOE_EP],
        moe_tp=of_axis[GroupAxis.MOE_TP],
        on_host=on_host,
    )


def _create_groups(sizes: ParallelSizes) -> dict[Partition, ProcessGroup | None]:
    """One process group a partition of the ranks, created in the same order everywhere; None for partitions into single ranks."""
    created: dict[Partition, ProcessGroup | None] = {}
    for axis in COMM_AXES:
        partition = group_ranks(sizes, axis)
        if partition in created:
            continue
        if len(partition) == 1:
            created[partition] = dist.group.WORLD
        elif len(partition) == sizes.ranks:
            created[partition] = None
        else:
            made: list[ProcessGroup] = [c10d.new_group(list(members)) for members in partition]
            created[partition] = next(
                group for group, members in zip(made, partition, strict=True) if dist.get_rank() in members
            )
    return created
