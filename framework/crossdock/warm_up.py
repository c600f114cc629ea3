"""Forward passes before a rank says that it is ready: not counted, and what they write goes to the scratch page."""

from __future__ import annotations

import attrs

from crossdock.engine_seams import StepRunner
from crossdock.graph_sizes import captured_prefill_rows
from crossdock.kv_cache import SCRATCH_PAGE
from crossdock.rank_plan import RankPlan
from crossdock.step import decide_step
from crossdock.step_rules import step_rules
from crossdock.step_work import SequenceRows, StepWork
from crossdock.types.parallel import ParallelSizes
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan

WARM_UP_STEP = -1
SIZE_RATIO = 4
"""From one warmed-up number of rows to the next: kernels have few forms, chosen by powers of two."""


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


def warm_up(runner: StepRunner, plan: RankPlan) -> None:
    """Runs the passes. Collective: a transport that does not work fails here, not in the first request.

    The first one is padding only. On a GPU prompts of the sizes that no graph holds follow: kernels are compiled and loaded now, which
    took more than a second of the first requests.
    """
    _run(runner, warm_up_plan(plan.sizes), StepWork())
    if plan.selection.device != "cuda":
        return
    rules = step_rules(plan)
    for work in prompt_works(plan):
        record = work.record(step=WARM_UP_STEP, eplb_pass=0, has_work=True, is_health_check=False)
        eager = attrs.evolve(record, prefill_graph_vote=0, local_can_run_overlap=0)
        _run(runner, decide_step([eager] * plan.sizes.attn_dp_size, rules), work)


def prompt_works(plan: RankPlan) -> tuple[StepWork, ...]:
    """Prompts of the largest step, of a quarter of its rows, and so on down to the captured sizes; last a prompt behind a cached page, with
    a row that generates beside it.
    """
    limits = plan.config.scheduler
    longest = min(limits.chunk_tokens, plan.max_sequence_tokens)
    works: list[StepWork] = []
    rows = limits.max_step_tokens
    while rows > max(captured_prefill_rows(plan), default=0):
        count = max(1, min(limits.max_running_requests, rows // longest))
        prompt = _prompt(min(rows, longest), 0, limits.page_tokens)
        works.append(StepWork(sequences=(prompt,) * count))
        rows //= SIZE_RATIO
    start = limits.page_tokens
    behind = min(longest, limits.max_step_tokens - 1, plan.max_sequence_tokens - start)
    if works and behind > 1 and limits.max_running_requests > 1:
        generating = SequenceRows(tokens=(0,), start=0, pages=(SCRATCH_PAGE,), num_logit_rows=1, is_decode=True)
        works.append(StepWork(sequences=(generating, _prompt(behind, start, limits.page_tokens))))
    return tuple(works)


def _prompt(rows: int, start: int, page_tokens: int) -> SequenceRows:
    """Rows that write to the scratch page and read it."""
    pages = -(-(start + rows) // page_tokens)
    return SequenceRows(tokens=(0,) * rows, start=start, pages=(SCRATCH_PAGE,) * pages, num_logit_rows=1)


def _run(runner: StepRunner, step: StepPlan, work: StepWork) -> None:
    runner.collect(runner.launch(step, runner.build(work, step), None, is_counted=False))
