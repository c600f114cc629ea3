"""Experts are read from the checkpoint again after they moved: every slot gets the one that the placement in force names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from crossdock.config import EplbConfig, PluginChoice
from crossdock.control_verbs import ControlVerbs
from crossdock.engine_build import build_engine
from crossdock.engine_seams import AgreedStep
from crossdock.eplb.manager import EplbManager
from crossdock.groups import leader_ranks
from crossdock.offline import logits_job
from crossdock.offline_job import OfflineJob
from crossdock.offline_link import OfflineLink
from crossdock.rank_plan import plan_rank
from crossdock.testing.random_models import random_model_config, write_random_model
from crossdock.testing.world import RankContext, RankPool
from crossdock.types.link import Control
from crossdock.types.placement import Placement
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan

Pool = Callable[[int], RankPool]
PROMPTS = [[(7 * place + 3 * index) % 96 for place in range(length)] for index, length in enumerate((24, 1, 31))]
IDLE = StepPlan(
    step=0,
    eplb_pass=0,
    live_tokens=(0, 0),
    padded_tokens=(0, 0),
    padding_mode=PaddingMode.MAX_LEN,
    forward_mode=ForwardMode.IDLE,
    dispatch_mode=DispatchMode.NORMAL,
    overlap=False,
    overlap_reason="",
)


def reload_after_moves(context: RankContext, job: OfflineJob) -> tuple[int, bool, bool, str]:
    """Moved slots, whether reloaded tensors are those that lay there in the same memory, and the answer while experts move."""
    plan = plan_rank(job.config, context.rank)
    is_leader = plan.place.rank in leader_ranks(plan.sizes)
    link = OfflineLink(job.requests(plan.place.attn_dp_rank, plan.sizes.attn_dp_size) if is_leader else [])
    with build_engine(plan, context.comms_of(plan.sizes), link) as engine:
        engine.run()
        manager = next(actor for actor in engine.between_steps if isinstance(actor, EplbManager))
        while manager.is_busy:
            manager.after_step(AgreedStep(plan=IDLE, records=()))
        tensors = [tensor for layer in manager.live.tensors for tensor in layer.tensors.values()]
        before, addresses = [tensor.clone() for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
        for tensor in tensors:
            tensor.zero_()
        verbs: ControlVerbs = engine.verbs
        reply = verbs.run(Control(call_id=1, verb="placement_reload", arguments={}), context.rank)
        assert reply.result["accepted"]
        same = all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))
        kept = [tensor.data_ptr() for tensor in tensors] == addresses
        placement = manager.live.placement()
        turned = placement.physical_to_logical[:, ::-1].copy()
        manager.apply(Placement.from_physical(turned, placement.num_logical_experts), "test")
        busy = verbs.run(Control(call_id=2, verb="placement_reload", arguments={}), context.rank)
        return sum(entry.moved_slots for entry in engine.counters.rebalances), same, kept, busy.result["reason"]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_reload_fills_every_slot_by_the_placement_in_force(family: str, tmp_path: Path, rank_pool: Pool) -> None:
    """Pitfall prime-rl#3583: the loader put experts where they had been at the start."""
    folder = write_random_model(tmp_path / "model", family)
    config = random_model_config(folder, ranks=2, attn_dp=2, dispatcher="alltoallv", chunk_tokens=2)
    eplb = EplbConfig(enabled=True, slots=12, interval=1)
    job = logits_job(folder, PROMPTS, attrs.evolve(config, eplb=eplb, eplb_algo=PluginChoice(name="global")))
    for moved, same, kept, reason in rank_pool(2).run(reload_after_moves, job):
        assert moved
        assert same, "a slot holds another expert than the map says"
        assert kept, "a tensor was replaced"
        assert "a rebalance is under way" in reason
