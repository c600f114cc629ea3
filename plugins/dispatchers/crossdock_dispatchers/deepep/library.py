"""The library behind the plugin: found, loaded, and its buffer made for both protocols."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from crossdock.errors import PluginImportFailed

from crossdock_dispatchers.deepep.capabilities import WHEEL
from crossdock_dispatchers.deepep.capacity import queue_depth

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

QUEUE_DEPTH_VARIABLE = "NVSHMEM_QP_DEPTH"
NVSHMEM_LIBRARIES = ("libnvshmem_host.so*", "nvshmem_bootstrap_uid.so*")
"""What the library links to and what that one opens by name, in the order of loading."""


def load_deep_ep() -> Any:
    """The module ``deep_ep``.

    NVSHMEM's wheel is not on the loader's path; its libraries are loaded first, so that nobody has to set ``LD_LIBRARY_PATH``.

    Raises:
        PluginImportFailed: it is absent or does not fit this torch; names the wheel that does.
    """
    try:
        _preload_nvshmem()
        return importlib.import_module("deep_ep")
    except (ImportError, OSError) as error:
        raise PluginImportFailed(
            f"dispatcher deepep cannot import deep_ep beside torch {torch.__version__} "
            f"({str(error).partition(chr(10))[0]}); the wheel that fits: {WHEEL}"
        ) from error


def world_group() -> ProcessGroup:
    """The group of all ranks, which is the expert group here."""
    group = dist.group.WORLD
    assert group is not None, "ranks join torch.distributed before dispatchers are built"
    return group


def _preload_nvshmem() -> None:
    """Loads NVSHMEM where it came as a wheel; elsewhere the loader finds it, or the import says what is missing."""
    found = importlib.util.find_spec("nvidia.nvshmem") if importlib.util.find_spec("nvidia") else None
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        for pattern in NVSHMEM_LIBRARIES:
            for path in sorted((Path(folder) / "lib").glob(pattern))[:1]:
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


@attrs.frozen(kw_only=True)
class BufferPlan:
    """Sizes of the one buffer of a process; equal on all ranks."""

    ranks: int
    hidden_size: int
    num_experts: int
    num_sms: tuple[int, ...]
    """Multiprocessors of the normal protocol's calls, in each way that they are made."""
    normal: bool
    low_latency_rows: int
    """0 without the low-latency protocol."""

    @property
    def queue_pairs(self) -> int:
        """Connections to each rank: one a multiprocessor for the normal protocol, one a local expert for the other."""
        low_latency = self.num_experts // self.ranks if self.low_latency_rows else 0
        return max(*self.num_sms, low_latency) if self.normal else low_latency


@attrs.frozen(kw_only=True, eq=False)
class NormalConfigs:
    """The library's settings of normal calls that run on so many multiprocessors; a combine must have those of its dispatch."""

    dispatch: Any
    combine: Any


def normal_configs(library: Any, ranks: int, num_sms: int) -> NormalConfigs:
    """What the library recommends for so many ranks and multiprocessors. It takes the latter from a field of its class, which is left as set here."""
    library.Buffer.set_num_sms(num_sms)
    return NormalConfigs(
        dispatch=library.Buffer.get_dispatch_config(ranks), combine=library.Buffer.get_combine_config(ranks)
    )


@functools.cache
def make_buffer(library: Any, group: ProcessGroup, plan: BufferPlan) -> Any:
    """``deep_ep.Buffer`` of the plan. Collective, and eager: made inside a graph capture it fails on some hosts.

    Made once a process: NVSHMEM starts with it, and its memory is mapped by all peers until the process ends.
    """
    nvl_bytes = rdma_bytes = 0
    for num_sms in plan.num_sms if plan.normal else ():
        configs = normal_configs(library, plan.ranks, num_sms)
        for config in (configs.dispatch, configs.combine):
            row_bytes = 2 * plan.hidden_size
            nvl_bytes = max(nvl_bytes, config.get_nvl_buffer_size_hint(row_bytes, plan.ranks))
            rdma_bytes = max(rdma_bytes, config.get_rdma_buffer_size_hint(row_bytes, plan.ranks))
    if plan.low_latency_rows:
        hint = library.Buffer.get_low_latency_rdma_size_hint(
            plan.low_latency_rows, plan.hidden_size, plan.ranks, plan.num_experts
        )
        rdma_bytes = max(rdma_bytes, hint)
        # The library reads it when it makes the buffer, and asserts on it in each call.
        depth = queue_depth(plan.low_latency_rows, int(os.environ.get(QUEUE_DEPTH_VARIABLE, "0")))
        os.environ[QUEUE_DEPTH_VARIABLE] = str(depth)
    return library.Buffer(
        group,
        nvl_bytes,
        rdma_bytes,
        low_latency_mode=plan.low_latency_rows > 0,
        num_qps_per_rank=plan.queue_pairs,
    )
