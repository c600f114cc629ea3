"""One forward pass before a rank says that it is ready: no tokens, not counted, through every layer and collective."""

from __future__ import annotations

from crossdock.engine_seams import StepRunner
from crossdock.step_work import StepWork
from crossdock.types.parallel import ParallelSizes
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan

WARM_UP_STEP = -1


def warm_up_plan(sizes: ParallelSizes) -> StepPlan:
    """Every replica brings padding only: one row for each of its attention-TP ranks."""
    return StepPlan(
        step=WARM_UP_STEP,
        eplb_pass=0,
        live_tokens=(0,) * sizes.attn_dp_size,
        padded_tokens=(sizes.attn_tp_size,) * sizes.attn_dp_size,
        padding_mode=PaddingMode.MAX_LEN,
        forward_mode=ForwardMode.PREFILL,
        dispatch_mode=DispatchMode.NORMAL,
        overlap=False,
        overlap_reason="warm_up",
        graph_reason="warm_up",
    )


def warm_up(runner: StepRunner, sizes: ParallelSizes) -> None:
    """Runs the pass. Collective: a transport that does not work fails here, not in the first request."""
    plan = warm_up_plan(sizes)
    in_flight = runner.launch(plan, runner.build(StepWork(), plan), None, is_counted=False)
    runner.collect(in_flight)
