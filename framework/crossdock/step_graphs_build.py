"""Captures a rank's small steps at start."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

import structlog
import torch

from crossdock.graph_sizes import captured_prefill_rows, captured_rows, overlapped_rows
from crossdock.padding import make_padding
from crossdock.step_graphs import CudaCapturer, StepGraphs
from crossdock.types.step import DispatchMode

if TYPE_CHECKING:
    from crossdock.rank_plan import RankPlan
    from crossdock.runner import ModelRunner
    from crossdock.types.attention import CapturableAttention

_LOG = structlog.get_logger("crossdock")


@torch.inference_mode()
def make_step_graphs(plan: RankPlan, runner: ModelRunner) -> StepGraphs | None:
    """The graphs of ``captured_rows``, ready to replay; None where there are none. Collective: every rank captures the same sizes."""
    sizes = captured_rows(plan)
    if not sizes:
        return None
    policy = plan.selection.plugin("padding")
    modes = plan.selection.plugin("dispatcher").capabilities.modes if plan.info.moe is not None else frozenset()
    graphs = StepGraphs(
        executor=runner.executor,
        # ``captured_rows`` is empty unless the backend can be captured.
        attention=cast("CapturableAttention", runner.attention),
        sizes=plan.sizes,
        place=plan.place,
        device=runner.device,
        dispatch_rows=runner.dispatch_rows,
        dispatch_mode=DispatchMode.LOW_LATENCY if DispatchMode.LOW_LATENCY in modes else DispatchMode.NORMAL,
        padding_mode=make_padding(policy.name, policy.options).captured_mode(),
        page_tokens=runner.page_tokens,
        max_sequence_tokens=plan.max_sequence_tokens,
        capturer=CudaCapturer(),
        sampled=runner.sampled,
        communication_sms=runner.communication_sms,
        recorder=runner.recorder,
    )
    overlapped, prefill = overlapped_rows(plan), captured_prefill_rows(plan)
    started_s = time.perf_counter()
    graphs.capture(sizes, overlapped, prefill)
    seconds = round(time.perf_counter() - started_s, 1)
    _LOG.info(
        "steps captured",
        rank=plan.place.rank,
        decode=len(sizes),
        overlapped=len(overlapped),
        prefill=len(prefill),
        seconds=seconds,
    )
    return graphs
