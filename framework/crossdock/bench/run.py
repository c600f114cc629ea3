"""Runs a benchmark on its ranks: in this process when there is one, else in processes of this machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from crossdock.bench.jobs import BenchJob, read_found, write_bench_job
from crossdock.config_rules import parallel_sizes
from crossdock.errors import UsageError
from crossdock.launch.runtime_folder import runtime_folder
from crossdock.local_ranks import run_local_ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from crossdock.comm import RankComms

RANK_MODULE = "crossdock.bench.rank"


def run_bench(job: BenchJob) -> list[dict[str, Any]]:
    """What every rank found, in rank order.

    Raises:
        UsageError: more machines than one, or the configuration cannot run.
        RuntimeFault: a rank failed.
    """
    if job.config.launch.nnodes > 1:
        raise UsageError("benchmarks run on one machine; set launch.nnodes to 1")
    ranks = parallel_sizes(job.config.parallel).ranks
    if ranks == 1:
        from crossdock.comm import local_comms, take_device

        take_device(job.config.launch.device, 0)
        return [bench_on_rank(job, 0, local_comms(), None)]
    threads = job.config.launch.threads_per_rank or max(1, (os.cpu_count() or 1) // ranks)
    with runtime_folder() as folder:
        write_bench_job(folder, job)
        run_local_ranks(RANK_MODULE, folder, ranks, threads)
        return read_found(folder, ranks)


def bench_on_rank(job: BenchJob, rank: int, comms: RankComms, store: Store | None) -> dict[str, Any]:
    """One rank's part, in this process; a collective when ``comms`` has several ranks."""
    import torch

    if job.kind == "engine":
        from crossdock.bench.engine import bench_engine_on_rank

        return bench_engine_on_rank(job, rank, comms, store)
    from crossdock.bench.dispatch import bench_dispatch_on_rank

    device = torch.device("cuda", torch.cuda.current_device()) if job.config.launch.device == "cuda" else None
    return bench_dispatch_on_rank(job, rank, comms, device or torch.device("cpu"))
