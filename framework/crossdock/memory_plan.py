"""What a rank is going to need memory for, worked out before any of it is taken: an estimate, on the large side where shapes leave a choice."""

from __future__ import annotations

import math

import attrs

from crossdock.errors import ConfigValueError
from crossdock.graph_sizes import captured_prefill_rows, captured_rows
from crossdock.groups import align_rows
from crossdock.host_memory import HEAP_MARGIN_BYTES, KERNEL_CACHE_BYTES
from crossdock.kv_storage import elements_per_token
from crossdock.moe_build import max_rows_per_rank
from crossdock.rank_plan import RankPlan
from crossdock.types.layout import FULL_ROWS
from crossdock.types.model import TensorSpec

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
KV_SHARE_OF_HOST = 0.125
"""Largest share of a machine's memory that the KV pools of its ranks take when ``scheduler.kv_tokens`` is 0."""
KV_SHARE_OF_DEVICE = 0.9
"""The same, of what is free on a GPU beside everything else: libraries and fragmentation take some."""
GRAPH_BYTES = 4 << 20
"""Nodes and parameters of one captured pass."""
SPLIT_BY_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_b_proj", "kv_b_proj", "embed_tokens", "lm_head")
"""Modules of which an attention-TP rank holds its share; everything else but experts counts whole."""
_MIB = 1 << 20


@attrs.frozen(kw_only=True)
class MemoryPlan:
    """Bytes of one rank."""

    device: str
    available_bytes: int
    """What this rank may take, before anything is allocated."""
    weights_bytes: int
    dispatcher_bytes: int
    """Rows on their way to the experts and back."""
    moving_bytes: int
    """Spare slots of one layer, where experts move."""
    step_bytes: int
    """Activations and logits of the largest step."""
    graphs_bytes: int
    kept_bytes: int
    """What a CPU's heap and its library's kernels take beside all that."""
    kv_bytes: int
    kv_tokens: int

    @property
    def needed_bytes(self) -> int:
        return sum(bytes_ for _, bytes_ in self._parts())

    def sentence(self) -> str:
        """The plan in one line."""
        parts = ", ".join(f"{name} {_mib(bytes_)}" for name, bytes_ in self._parts() if bytes_)
        return f"{_mib(self.needed_bytes)} of {_mib(self.available_bytes)} on this {self.device}: {parts}"

    def check(self) -> None:
        """Raises ``ConfigValueError`` with the numbers when it does not fit."""
        if self.needed_bytes > self.available_bytes:
            raise ConfigValueError(
                [
                    f"memory: a rank needs {self.sentence()}; lower scheduler.kv_tokens, scheduler.max_step_tokens or "
                    "scheduler.max_running_requests, or use more ranks"
                ]
            )

    def _parts(self) -> tuple[tuple[str, int], ...]:
        return (
            ("weights", self.weights_bytes),
            (f"KV cache of {self.kv_tokens} tokens", self.kv_bytes),
            ("dispatcher", self.dispatcher_bytes),
            ("moving experts", self.moving_bytes),
            ("largest step", self.step_bytes),
            ("graphs", self.graphs_bytes),
            ("kept by heap and libraries", self.kept_bytes),
        )


def plan_memory(plan: RankPlan, available_bytes: int, machine_bytes: int) -> MemoryPlan:
    """The plan of a rank, the same on all ranks that are given the same numbers.

    Args:
        plan: what the rank is going to be.
        available_bytes: it may take in all.
        machine_bytes: of the whole machine, for the KV pools' share on a CPU.
    """
    fixed = MemoryPlan(
        device="GPU" if plan.selection.device == "cuda" else "machine",
        available_bytes=available_bytes,
        weights_bytes=_weights_bytes(plan),
        dispatcher_bytes=_dispatcher_bytes(plan),
        moving_bytes=_moving_bytes(plan),
        step_bytes=_step_bytes(plan),
        graphs_bytes=_graphs_bytes(plan),
        kept_bytes=0 if plan.selection.device == "cuda" else HEAP_MARGIN_BYTES + KERNEL_CACHE_BYTES,
        kv_bytes=0,
        kv_tokens=0,
    )
    per_token = plan.info.num_layers * elements_per_token(plan.info.kv) * ITEM_BYTES[plan.dtype]
    limits = plan.config.scheduler
    left = available_bytes - fixed.needed_bytes
    if plan.selection.device == "cuda":
        share = int(left * KV_SHARE_OF_DEVICE)
    else:
        share = min(left, int(machine_bytes * KV_SHARE_OF_HOST) // ranks_on_machine(plan))
    tokens = limits.kv_tokens or affordable_tokens(plan, per_token, share)
    return attrs.evolve(fixed, kv_tokens=tokens, kv_bytes=tokens * per_token)


def affordable_tokens(plan: RankPlan, bytes_per_token: int, kv_bytes: int) -> int:
    """Tokens for ``kv_tokens = 0``: all running requests at full length, or as many as fit into ``kv_bytes``; one page at the least."""
    limits = plan.config.scheduler
    most = limits.max_running_requests * plan.max_sequence_tokens
    full_pages = -(-most // limits.page_tokens) * limits.page_tokens
    return min(full_pages, max(limits.page_tokens, kv_bytes // bytes_per_token))


def ranks_on_machine(plan: RankPlan) -> int:
    """Ranks that share the memory of one machine."""
    return -(-plan.sizes.ranks // plan.config.launch.nnodes)


def _weights_bytes(plan: RankPlan) -> int:
    experts = shared = whole = 0
    for name, spec in plan.info.tensors.items():
        size = _tensor_bytes(spec, ITEM_BYTES[plan.dtype])
        parts = name.split(".")
        if "experts" in parts:
            experts += size
        elif any(part in SPLIT_BY_ATTENTION for part in parts):
            shared += size
        else:
            whole += size
    sizes, moe = plan.sizes, plan.info.moe
    if moe is not None:
        experts = experts * plan.num_physical_experts // moe.num_logical_experts
    return experts // (sizes.moe_ep_size * sizes.moe_tp_size) + shared // sizes.attn_tp_size + whole


def _tensor_bytes(spec: TensorSpec, itemsize: int) -> int:
    elements = math.prod(spec.shape)
    return elements + elements // 4096 if spec.fp8_block else elements * itemsize


def _dispatcher_bytes(plan: RankPlan) -> int:
    """One buffer of all ranks' rows each way and micro-batch."""
    if plan.info.moe is None or plan.sizes.ranks == 1:
        return 0
    rows = max_rows_per_rank(plan, plan.selection.plugin("dispatcher").capabilities.input_rows)
    micro_batches: int = plan.selection.plugin("strategy").capabilities.micro_batches
    return 2 * micro_batches * plan.sizes.ranks * rows * plan.info.hidden_size * ITEM_BYTES[plan.dtype]


def _moving_bytes(plan: RankPlan) -> int:
    moe = plan.info.moe
    if moe is None or not plan.config.eplb.enabled:
        return 0
    local = plan.num_physical_experts // plan.sizes.moe_ep_size
    inner = moe.intermediate_size // plan.sizes.moe_tp_size
    itemsize = 1 if moe.weight_dtype == "fp8_block" else ITEM_BYTES[plan.dtype]
    return 3 * local * moe.hidden_size * inner * itemsize


def _step_bytes(plan: RankPlan) -> int:
    """Of the attention's rows some eight widths at once, of the experts' their inputs, both projections and outputs; float32 logits."""
    limits, moe, itemsize = plan.config.scheduler, plan.info.moe, ITEM_BYTES[plan.dtype]
    attention = limits.max_step_tokens * 8 * plan.info.hidden_size
    experts = 0
    if moe is not None:
        rows = max_rows_per_rank(plan, FULL_ROWS)
        here = rows * moe.top_k // plan.sizes.moe_ep_size
        experts = here * (2 * moe.hidden_size + 3 * moe.intermediate_size // plan.sizes.moe_tp_size)
    logits = limits.max_running_requests * plan.info.vocab_size * 2 * 4
    return (attention + experts) * itemsize + logits


def _graphs_bytes(plan: RankPlan) -> int:
    """Every captured pass keeps its logits and its page table; the rest of their memory is shared and small beside the largest step's."""
    decode, prefill = captured_rows(plan), captured_prefill_rows(plan)
    most = plan.config.scheduler.max_running_requests
    logits = sum(decode) + sum(min(rows, align_rows(most, plan.sizes.attn_tp_size)) for rows in prefill)
    columns = -(-plan.max_sequence_tokens // plan.config.scheduler.page_tokens)
    tables = (sum(decode) + sum(prefill)) * columns
    return (logits * plan.info.vocab_size + tables) * 4 + (len(decode) + len(prefill)) * GRAPH_BYTES


def _mib(bytes_: int) -> str:
    return f"{bytes_ / _MIB:,.0f} MiB"
