"""Runs offline jobs on a pool of ranks that is already there: what ``logits`` and ``generate`` do, without starting processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossdock.offline_job import OfflineJob, OfflineResult, run_job_on_rank
from crossdock.rank_plan import plan_rank

if TYPE_CHECKING:
    from crossdock.testing.world import RankContext, RankPool


def job_on_rank(context: RankContext, job: OfflineJob) -> OfflineResult:
    """One rank's part; call it through ``RankPool.run`` or ``OneProcessWorld.run``."""
    plan = plan_rank(job.config, context.rank)
    return run_job_on_rank(job, plan, context.comms_of(plan.sizes))


def run_on_pool(pool: RankPool, job: OfflineJob, timeout_s: float = 60.0) -> OfflineResult:
    """Results of all replicas."""
    parts = pool.run(job_on_rank, job, timeout_s=timeout_s)
    return OfflineResult(
        outputs={rid: outputs for part in parts for rid, outputs in part.outputs.items()},
        logits={rid: array for part in parts for rid, array in part.logits.items()},
        receipt=parts[0].receipt,
    )
