"""Builds the model runner of one rank: dispatcher, experts, picker, recorder, attention, weights, KV cache, executor."""

from __future__ import annotations

import attrs
import numpy as np
import structlog
import torch

from crossdock.attention import make_attention
from crossdock.checkpoint import open_checkpoint
from crossdock.comm import RankComms
from crossdock.eplb.build import make_spare_slots
from crossdock.eplb.spare_slots import SpareSlots
from crossdock.executor import Executor
from crossdock.groups import align_rows
from crossdock.host_memory import available_bytes, machine_bytes
from crossdock.kv_storage import KvPlan, KvStorage, plan_kv_cache
from crossdock.memory_plan import KV_SHARE_OF_DEVICE, MemoryPlan, affordable_tokens, plan_memory, ranks_on_machine
from crossdock.model import make_model
from crossdock.moe_build import make_moe_parts
from crossdock.observe.recorder import ExpertLoadRecorder
from crossdock.rank_plan import RankPlan, step_depth
from crossdock.runner import ModelRunner
from crossdock.step_graphs_build import make_step_graphs
from crossdock.strategy import make_strategy
from crossdock.types.attention import Attention, AttentionSpec
from crossdock.types.layout import FULL_ROWS
from crossdock.types.model import Model, ModelSpec, MoeParts

_LOG = structlog.get_logger("crossdock")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16"}


@attrs.frozen(kw_only=True, eq=False)
class BuiltRunner:
    """A runner with the parts that others need to reach."""

    runner: ModelRunner
    model: Model
    kv: KvStorage
    memory: MemoryPlan
    moe: MoeParts | None
    recorder: ExpertLoadRecorder | None
    """None for a dense model, or where nothing is counted."""
    spare: SpareSlots | None = None
    """None where experts do not move."""


def build_runner(plan: RankPlan, comms: RankComms, device: torch.device) -> BuiltRunner:
    """Loads this rank's weights and puts everything together. Collective: every rank calls it.

    Raises:
        CheckpointError: tensors do not fit the model.
        ConfigError: a capacity or the KV cache is too small, or memory is.
        PluginError: a plugin declines.
    """
    memory = agreed_memory_plan(plan, comms, device)
    _LOG.info("memory plan", rank=plan.place.rank, plan=memory.sentence())
    dtype = _DTYPES[plan.dtype]
    strategy_choice = plan.selection.plugin("strategy")
    strategy = make_strategy(strategy_choice.name, strategy_choice.options)
    attention = _make_attention(plan, dtype, device)
    moe = None
    if plan.info.moe is not None:
        moe = make_moe_parts(plan, plan.info.moe, comms, dtype, device, strategy.capabilities.micro_batches)
    model = make_model(_model_spec(plan, comms, dtype, device, attention, moe))
    # Before the KV cache, which takes what memory is left.
    spare = make_spare_slots(plan, model)
    kv = KvStorage(plan.info.kv, _plan_kv(plan, memory, comms, dtype, device), dtype=dtype, device=device)
    model.bind_kv_cache(kv.caches)
    recorder = moe.recorder if moe is not None and isinstance(moe.recorder, ExpertLoadRecorder) else None
    runner = ModelRunner(
        sizes=plan.sizes,
        place=plan.place,
        device=device,
        sampled=torch.zeros(_most_ids(plan), dtype=torch.int64, device=device),
        peers=comms.attn_tp if plan.sizes.attn_tp_size > 1 and step_depth(plan) else None,
        page_tokens=plan.config.scheduler.page_tokens,
        executor=Executor(model, strategy),
        attention=attention,
        recorder=recorder,
        dispatch_rows=FULL_ROWS if moe is None else moe.dispatcher.capabilities.input_rows,
        eos_token_ids=frozenset(plan.info.eos_token_ids),
        overlap=strategy.capabilities.overlap,
        communication_sms=0 if moe is None else moe.dispatcher.capabilities.communication_sms,
    )
    runner.graphs = make_step_graphs(plan, runner)
    return BuiltRunner(runner=runner, model=model, kv=kv, memory=memory, moe=moe, recorder=recorder, spare=spare)


def _most_ids(plan: RankPlan) -> int:
    """Ids that a step can sample, filled up to the largest captured size."""
    return align_rows(plan.config.scheduler.max_running_requests, plan.sizes.attn_tp_size)


def _make_attention(plan: RankPlan, dtype: torch.dtype, device: torch.device) -> Attention:
    choice = plan.selection.plugin("attention")
    spec = AttentionSpec(
        page_tokens=plan.config.scheduler.page_tokens,
        num_heads=plan.info.num_heads,
        kv=plan.info.kv,
        dtype=dtype,
        device=device,
        row_invariant=plan.selection.row_invariant,
    )
    return make_attention(choice.name, choice.options, spec)


def _model_spec(
    plan: RankPlan,
    comms: RankComms,
    dtype: torch.dtype,
    device: torch.device,
    attention: Attention,
    moe: MoeParts | None,
) -> ModelSpec:
    checkpoint = open_checkpoint(
        plan.folder,
        plan.config.checkpoint.load_format,
        plan.info.tensors,
        _SAFETENSORS_DTYPES[plan.dtype],
        plan.config.checkpoint.seed,
        device,
    )
    return ModelSpec(
        config=plan.model_config,
        checkpoint=checkpoint,
        sizes=plan.sizes,
        place=plan.place,
        comms=comms,
        dtype=dtype,
        device=device,
        attention=attention,
        moe=moe,
        dense_tp_size=plan.config.parallel.dense_tp_size,
    )


def agreed_memory_plan(plan: RankPlan, comms: RankComms, device: torch.device) -> MemoryPlan:
    """The memory plan for the rank with the least memory, on every rank. Collective.

    Raises:
        ConfigValueError: on every rank, when it does not fit.
    """
    if device.type == "cuda":
        free = machine = torch.cuda.mem_get_info(device)[0] // plan.config.launch.ranks_per_gpu
    else:
        free, machine = available_bytes() // ranks_on_machine(plan), machine_bytes()
    everyone = comms.host.world.all_gather(torch.tensor([[free, machine]], dtype=torch.int64))
    least = everyone.amin(dim=0)
    memory = plan_memory(plan, int(least[0]), int(least[1]))
    memory.check()
    return memory


def _plan_kv(plan: RankPlan, memory: MemoryPlan, comms: RankComms, dtype: torch.dtype, device: torch.device) -> KvPlan:
    """Pages for the planned tokens. Derived ones on a GPU are counted again, now that the weights are there: the same number on every rank."""
    tokens = memory.kv_tokens
    has_own_gpu = device.type == "cuda" and plan.config.launch.ranks_per_gpu == 1
    if has_own_gpu and not plan.config.scheduler.kv_tokens:
        left = torch.cuda.mem_get_info(device)[0] - memory.step_bytes - memory.graphs_bytes
        tokens = affordable_tokens(plan, memory.kv_bytes // memory.kv_tokens, int(left * KV_SHARE_OF_DEVICE))
    everyone = comms.host.world.all_gather(torch.tensor([tokens], dtype=torch.int64))
    return plan_kv_cache(
        plan.info.kv,
        num_layers=plan.info.num_layers,
        tokens=int(np.min(everyone.numpy())),
        page_tokens=plan.config.scheduler.page_tokens,
        itemsize=dtype.itemsize,
    )
