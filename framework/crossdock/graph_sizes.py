"""Which sizes of steps are captured: pure data of a rank's plan, equal on all ranks."""

from __future__ import annotations

from crossdock.groups import align_rows
from crossdock.kv_storage import elements_per_token
from crossdock.rank_plan import RankPlan
from crossdock.types.step import DispatchMode

CAPTURABLE_POINTS = ("dispatcher", "experts", "attention", "strategy")
"""Points whose capabilities say ``graph_capture``."""
CAPTURABLE_RECORDERS = ("off", "stat", "per_pass")
"""Recorder modes whose counting is fixed operations on fixed tensors."""
DENSE_SIZES = 8
"""Below this every power of two is captured, above it every multiple up to ``STEP_LIMIT``, then of four times it."""
STEP_LIMIT = 64
LEAST_PREFILL_ROWS = 64
"""Of the smallest captured step with prompt tokens; others double. Padding costs next to nothing there: weights are what such a step reads."""
CAPTURED_CONTEXT_BYTES = 1 << 30
"""Most bytes that a captured step's prompts read of a layer's cache, nearly all from the L2 cache. Each row reads its own context, where an eager
step shares reads between the rows of a prompt. At this limit 1,000 new tokens of Qwen3-30B take 27 ms captured and 38 ms eager (H200)."""
HEADS_A_READ = 16
"""Heads of latent attention that share a read, at the least product of tensor cores."""


def captured_rows(plan: RankPlan) -> tuple[int, ...]:
    """Decode sizes in rows of a replica, ascending; empty where steps are not captured: off the GPU, with ``scheduler.graphs = "off"``, with a plugin
    that cannot be captured, or with a recorder that keeps more of a pass than its routed counts.
    """
    config = plan.config
    keeps_more = config.recorder.mode not in CAPTURABLE_RECORDERS
    if plan.selection.device != "cuda" or config.scheduler.graphs == "off" or keeps_more:
        return ()
    points = CAPTURABLE_POINTS if plan.info.moe is not None else ("attention", "strategy")
    if not all(plan.selection.plugin(point).capabilities.graph_capture for point in points):
        return ()
    if plan.info.moe is not None and not plan.selection.plugin("expert_location").capabilities.capturable:
        return ()
    return bucket_sizes(config.scheduler.max_running_requests, plan.sizes.attn_tp_size)


def captured_prefill_rows(plan: RankPlan) -> tuple[int, ...]:
    """Sizes of captured steps with prompt tokens in rows of a replica, ascending; empty where decode steps are not captured either, or where
    the attention backend takes no prompts in a graph.
    """
    decode = captured_rows(plan)
    if not decode or not plan.selection.plugin("attention").capabilities.prefill_capture:
        return ()
    limits = plan.config.scheduler
    most = min(limits.graph_prefill_rows, limits.max_step_tokens)
    if plan.info.moe is not None and DispatchMode.LOW_LATENCY in plan.selection.plugin("dispatcher").capabilities.modes:
        # That protocol is what a graph holds, and it has room for decode steps.
        most = min(most, decode[-1])
    sizes: list[int] = []
    while most and (not sizes or sizes[-1] < most):
        sizes.append(min(most, 2 * sizes[-1] if sizes else LEAST_PREFILL_ROWS))
    return tuple(sorted({align_rows(size, plan.sizes.attn_tp_size) for size in sizes}))


def captured_pairs(plan: RankPlan, itemsize: int) -> int:
    """Query-key pairs of prompts up to which a step is captured; ``itemsize``: bytes of an element of the cache."""
    kv = plan.info.kv
    reads = -(-plan.info.num_heads // HEADS_A_READ) if kv.kind == "mla" else 1
    return CAPTURED_CONTEXT_BYTES // (elements_per_token(kv) * itemsize * reads)


def overlapped_rows(plan: RankPlan) -> tuple[int, ...]:
    """Those of ``captured_rows`` that are captured in two micro-batches, too: where decode steps may overlap and both halves have rows."""
    strategy = plan.selection.plugin("strategy").capabilities
    if strategy.micro_batches == 1 or plan.info.moe is None:
        return ()
    least = 2
    if strategy.overlap.is_gated:
        if not plan.selection.plugin("dispatcher").capabilities.split_is_useful:
            return ()
        least = max(least, strategy.overlap.min_decode_rows)
    return tuple(rows for rows in captured_rows(plan) if rows >= least)


def bucket_sizes(most: int, multiple: int) -> tuple[int, ...]:
    """Powers of two, then steps, up to ``most`` rows, each rounded up to ``multiple``."""
    sizes = [1, 2, 4]
    sizes += range(DENSE_SIZES, STEP_LIMIT, DENSE_SIZES)
    sizes += range(STEP_LIMIT, most, 4 * DENSE_SIZES)
    fitting = [size for size in sizes if size < most]
    return tuple(sorted({align_rows(size, multiple) for size in [*fitting, most]}))
