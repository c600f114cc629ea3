"""One rank process of a benchmark: ``python -m crossdock.bench.rank FOLDER RANK``."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from crossdock.bench.jobs import read_bench_job, write_found
from crossdock.bench.run import bench_on_rank
from crossdock.config_rules import parallel_sizes
from crossdock.local_ranks import end_with_parent, write_error

_STORE_FILE = "store"


def main() -> int:
    """Runs the rank's part of the job in FOLDER; errors go to a file there, anything else to stderr."""
    end_with_parent()
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    try:
        _run(folder, rank)
    except Exception as error:  # noqa: BLE001 - the process that started us tells the user, whatever it is
        traceback.print_exc()
        return write_error(folder, rank, error)
    return 0


def _run(folder: Path, rank: int) -> None:
    from torch._C._distributed_c10d import FileStore

    from crossdock.comm import create_comms, join_process_group, take_device

    job = read_bench_job(folder)
    launch, sizes = job.config.launch, parallel_sizes(job.config.parallel)
    take_device(launch.device, rank, launch.ranks_per_gpu)
    store = FileStore(str(folder / _STORE_FILE), sizes.ranks)
    join_process_group(
        rank=rank, ranks=sizes.ranks, store=store, device_type=launch.device, timeout_s=launch.start_timeout_s
    )
    comms = create_comms(sizes, rank, launch.device)
    write_found(folder, rank, bench_on_rank(job, rank, comms, store))


if __name__ == "__main__":
    sys.exit(main())
