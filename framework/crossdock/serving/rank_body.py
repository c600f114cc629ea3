"""What a rank of a served model does: joins the others, builds the engine, says that it is ready, steps."""

from __future__ import annotations

import os
import time

import structlog
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from crossdock.comm import RankComms, create_comms, join_process_group, local_comms
from crossdock.engine_build import build_engine
from crossdock.launch.rendezvous import join_store
from crossdock.rank_plan import RankPlan, plan_rank
from crossdock.serving.rank_spec import RankSpec
from crossdock.types.link import RankLink, Ready

_LOG = structlog.get_logger("crossdock.rank")


def run_model_rank(spec: RankSpec, link: RankLink) -> None:
    """Runs one rank until the engine stops; a ``RankBody``."""
    begin_s = time.monotonic()
    plan = plan_rank(spec.config, spec.rank)
    if plan.config.launch.device == "cuda":
        torch.cuda.set_device(spec.local_rank)
    comms = _join(spec, plan)
    joined_s = time.monotonic()
    _LOG.info("joined", ranks=plan.sizes.ranks, seconds=round(joined_s - begin_s, 1))
    with build_engine(plan, comms, link, run_id=spec.store.prefix) as engine:
        _LOG.info("built", seconds=round(time.monotonic() - joined_s, 1))
        receipt = {
            "pid": os.getpid(),
            "attn_dp_rank": plan.place.attn_dp_rank,
            "attn_tp_rank": plan.place.attn_tp_rank,
            "moe_ep_rank": plan.place.moe_ep_rank,
            "moe_tp_rank": plan.place.moe_tp_rank,
            "capacity": dict(engine.counters.capacity),
        }
        link.send(Ready(rank=spec.rank, receipt=receipt))
        engine.run()
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(spec: RankSpec, plan: RankPlan) -> RankComms:
    if plan.sizes.ranks == 1:
        return local_comms()
    launch = plan.config.launch
    store = PrefixStore(spec.store.prefix, join_store(spec.store, launch.start_timeout_s))
    join_process_group(
        rank=spec.rank,
        ranks=plan.sizes.ranks,
        store=store,
        device_type=launch.device,
        timeout_s=launch.start_timeout_s,
    )
    return create_comms(plan.sizes, spec.rank, launch.device)
