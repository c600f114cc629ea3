"""One rank process of an offline job: ``python -m crossdock.offline_rank FOLDER RANK``."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from crossdock.local_ranks import end_with_parent, write_error
from crossdock.offline_job import OfflineJob, read_job, run_job_on_rank, write_result
from crossdock.rank_plan import plan_rank

_STORE_FILE = "store"


def main() -> int:
    """Runs the rank's part of the job in FOLDER; errors go to a file there, anything else to stderr."""
    end_with_parent()
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    try:
        job = read_job(folder)
        _run(folder, rank, job)
    except Exception as error:  # noqa: BLE001 - the process that started us tells the user, whatever it is
        traceback.print_exc()
        return write_error(folder, rank, error)
    return 0


def _run(folder: Path, rank: int, job: OfflineJob) -> None:
    from torch._C._distributed_c10d import FileStore

    from crossdock.comm import create_comms, join_process_group, take_device
    from crossdock.host_memory import bound_kernel_caches, keep_freed_memory

    keep_freed_memory()
    bound_kernel_caches()
    launch = job.config.launch
    plan = plan_rank(job.config, rank)
    sizes = plan.sizes
    take_device(launch.device, rank, launch.ranks_per_gpu)
    store = FileStore(str(folder / _STORE_FILE), sizes.ranks)
    join_process_group(
        rank=rank, ranks=sizes.ranks, store=store, device_type=launch.device, timeout_s=launch.start_timeout_s
    )
    comms = create_comms(sizes, rank, launch.device)
    result = run_job_on_rank(job, plan, comms, store)
    write_result(folder, rank, result)


if __name__ == "__main__":
    sys.exit(main())
