"""Runs offline jobs on a pool of ranks that is already there: what ``logits`` and ``generate`` do, without starting processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from crossdock.offline_job import OfflineJob, OfflineResult, run_job_on_rank
from crossdock.rank_plan import RankPlan, plan_rank

if TYPE_CHECKING:
    from crossdock.config import Config
    from crossdock.testing.world import RankContext, RankPool


def plan_on(context: RankContext, config: Config) -> RankPlan:
    """The plan of a pool's rank; ranks that share a GPU plan with their part of its memory."""
    launch = attrs.evolve(config.launch, ranks_per_gpu=context.ranks_per_gpu)
    return plan_rank(attrs.evolve(config, launch=launch), context.rank)


def job_on_rank(context: RankContext, job: OfflineJob) -> OfflineResult:
    """One rank's part; call it through ``RankPool.run`` or ``OneProcessWorld.run``."""
    plan = plan_on(context, job.config)
    return run_job_on_rank(job, plan, context.comms_of(plan.sizes))


def run_on_pool(pool: RankPool, job: OfflineJob, timeout_s: float = 60.0) -> OfflineResult:
    """Results of all replicas."""
    parts = pool.run(job_on_rank, job, timeout_s=timeout_s)
    return OfflineResult(
        outputs={rid: outputs for part in parts for rid, outputs in part.outputs.items()},
        logits={rid: array for part in parts for rid, array in part.logits.items()},
        receipt=parts[0].receipt,
    )
