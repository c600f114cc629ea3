"""What a rank of a served model does before the engine takes over: plans itself and joins the others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import structlog
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from crossdock.comm import RankComms, create_comms, join_process_group, local_comms, take_device
from crossdock.engine_build import run_rank
from crossdock.launch.rendezvous import join_store
from crossdock.native_code import native_code
from crossdock.rank_plan import RankPlan, plan_rank
from crossdock.serving.rank_spec import RankSpec
from crossdock.types.link import RankLink

_LOG = structlog.get_logger("crossdock.rank")


def run_model_rank(spec: RankSpec, link: RankLink) -> None:
    """Runs one rank until the engine stops; a ``RankBody``."""
    begin_s = time.monotonic()
    plan = plan_rank(spec.config, spec.rank)
    launch = plan.config.launch
    take_device(launch.device, spec.local_rank, launch.ranks_per_gpu)
    say_kernels(plan)
    say_shared_gpu(plan)
    comms, store = _join(spec, plan)
    _LOG.info("joined", ranks=plan.sizes.ranks, seconds=round(time.monotonic() - begin_s, 1))
    run_rank(plan, comms, link, store=store)
    if dist.is_initialized():
        dist.destroy_process_group()


def say_kernels(plan: RankPlan) -> None:
    """Says once a job that CPU kernels are missing: nothing fails, decode is slower."""
    if plan.config.launch.device != "cpu" or plan.place.rank != 0:
        return
    code = native_code()
    if code.library is None:
        _LOG.warning("compiled CPU kernels are absent, torch operators run instead and are slower", reason=code.reason)


def say_shared_gpu(plan: RankPlan) -> None:
    """Warns once a job where kernels of different ranks cannot run at the same time."""
    launch = plan.config.launch
    if launch.device != "cuda" or launch.ranks_per_gpu == 1 or plan.place.rank != 0:
        return
    # Where the daemon itself puts its pipes when nothing is said.
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    if not pipes.exists():
        _LOG.warning(
            "ranks share a GPU without the CUDA MPS daemon: a kernel that waits for another rank waits for its turn, milliseconds each time",
            ranks_per_gpu=launch.ranks_per_gpu,
        )


def _join(spec: RankSpec, plan: RankPlan) -> tuple[RankComms, Store | None]:
    """This rank's groups and the store where the ranks met; one rank alone needs none."""
    if plan.sizes.ranks == 1:
        return local_comms(), None
    launch = plan.config.launch
    store = PrefixStore(spec.store.prefix, join_store(spec.store, launch.start_timeout_s))
    join_process_group(
        rank=spec.rank,
        ranks=plan.sizes.ranks,
        store=store,
        device_type=launch.device,
        timeout_s=launch.start_timeout_s,
    )
    return create_comms(plan.sizes, spec.rank, launch.device), store
