"""The rules by which all ranks decide a step, from the checked selection."""

from __future__ import annotations

from crossdock.graph_sizes import captured_pairs, captured_prefill_rows, captured_rows, overlapped_rows
from crossdock.overlap_decision import OverlapRules
from crossdock.padding import make_padding
from crossdock.rank_plan import RankPlan
from crossdock.step import StepRules
from crossdock.types.step import DispatchMode

_ITEMSIZE = {"float32": 4, "bfloat16": 2}


def step_rules(plan: RankPlan) -> StepRules:
    """Equal on all ranks: everything in it was part of the agreement at start."""
    choice = plan.selection.plugin("padding")
    has_experts = plan.info.moe is not None
    dispatcher = plan.selection.plugin("dispatcher").capabilities if has_experts else None
    strategy = plan.selection.plugin("strategy").capabilities
    return StepRules(
        sizes=plan.sizes,
        padding=make_padding(choice.name, choice.options),
        hidden_size=plan.info.hidden_size,
        itemsize=_ITEMSIZE[plan.dtype],
        dispatch_modes=frozenset({DispatchMode.NORMAL}) if dispatcher is None else dispatcher.modes,
        symmetric_counts_required=dispatcher is not None and dispatcher.symmetric_counts_required,
        captured_rows=captured_rows(plan),
        captured_prefill_rows=captured_prefill_rows(plan),
        captured_pairs=captured_pairs(plan, _ITEMSIZE[plan.dtype]),
        overlap=None
        if strategy.micro_batches == 1
        else OverlapRules(
            limits=strategy.overlap,
            has_communication=dispatcher is not None and dispatcher.split_is_useful,
            captured_rows=overlapped_rows(plan),
        ),
    )
