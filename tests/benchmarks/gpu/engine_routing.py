"""Routers of the engine's benchmark: from now on all alike, and how many experts a layer's rows touch."""

from __future__ import annotations

import statistics
from typing import Any

from crossdock.comm import RankComms
from crossdock.types.model import OpKind
from crossdock.types.step import ForwardMode

TIED = "tied"
"""First word of the names of workloads that every token's same experts serve."""
TOLD_SHAPES = ("dsv2_lite",)
"""Compared with figures whose routers touched few experts: both routings are told."""
COUNTED_LAYERS = 4


def tie_routers(runner: Any) -> None:
    """Every router of a built model on a GPU scores all experts the same, in captured passes too: each token takes the same ones."""
    for op in (op for stage in runner.executor.plan(ForwardMode.DECODE).stages for op in stage):
        if op.kind is OpKind.ROUTE:
            op.fn.__self__._router._linear._parts.zero_()


def touched_experts(runner: Any, comms: RankComms) -> dict[str, float]:
    """Experts with rows, a layer, by the power of two above the pass's rows; over the recorder's window."""
    counts = runner.recorder.logical_counts(comms.world).cpu()
    found: dict[int, list[float]] = {}
    for one in counts:
        choices = int(one[0].sum())
        if choices:
            found.setdefault(choices.bit_length(), []).append(float((one > 0).sum(dim=1).float().mean()))
    return {f"{1 << size} choices": round(statistics.mean(values), 1) for size, values in sorted(found.items())}
