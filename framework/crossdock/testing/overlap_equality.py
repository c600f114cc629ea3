"""Proves on ranks that a strategy gives the bits of ``sequential``: for strategies of ours and of third parties.

Bits can be equal only where a row's result does not depend on the rows beside it. The driver is set so: attention row by row, one form of
the projections for any number of rows, experts on so few rows at a time that their kernel keeps one form.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import attrs
import torch

from crossdock.ops import packed_linear
from crossdock.testing.model_driver import ModelDriver, Work
from crossdock.testing.model_parts import DriverChoice
from crossdock.testing.world import RankContext
from crossdock.types.parallel import ParallelSizes

EXPERT_ROWS = 6
"""With a few more rows an expert (the number depends on the instruction set), the kernel works by blocks of turned weights, which round
differently."""
WIDE_FIELDS: dict[str, dict[str, object]] = {
    "qwen3_moe": {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 32},
    "mixtral": {"hidden_size": 64, "head_dim": 32, "intermediate_size": 64, "num_local_experts": 32},
    "deepseek_v2": {"hidden_size": 64, "moe_intermediate_size": 64, "n_routed_experts": 32},
    "deepseek_v3": {"hidden_size": 64, "moe_intermediate_size": 64, "n_routed_experts": 32},
}
"""Sizes of tiny models by family that the C kernels take, and that element-wise operators read in whole vectors."""


@attrs.frozen(kw_only=True)
class OverlapFinding:
    """What one rank saw."""

    reasons: tuple[str, ...]
    """Of each step; empty for one that overlapped."""
    differences: tuple[str, ...]
    """Steps whose logits differ, with the largest difference."""


def compare_with_sequential(
    context: RankContext, choice: DriverChoice, sizes: ParallelSizes, steps: Sequence[Sequence[Work]]
) -> OverlapFinding:
    """Runs ``steps`` under the strategy of ``choice`` and under ``sequential`` on one rank of a pool."""
    torch.set_num_threads(1)
    choice = attrs.evolve(choice, attention_options={"rows": "alone"}, expert_rows=EXPERT_ROWS)
    plain = attrs.evolve(choice, strategy="sequential", strategy_options={})
    comms = context.comms_of(sizes)
    with one_form_of_projections():
        ours, theirs = (ModelDriver(each, sizes, context.place(sizes), comms) for each in (choice, plain))
        differences: list[str] = []
        for number, work in enumerate(steps):
            found, wanted = ours.step(work), theirs.step(work)
            for sequence, rows in wanted.items():
                if not torch.equal(found[sequence], rows):
                    largest = float((found[sequence] - rows).abs().max())
                    differences.append(f"step {number}, sequence {sequence}: {largest:.2e}")
    return OverlapFinding(reasons=tuple(ours.overlap_reasons), differences=tuple(differences))


@contextmanager
def one_form_of_projections() -> Generator[None]:
    """Few rows take the same kernel as many."""
    before = packed_linear.FEW_ROWS
    packed_linear.FEW_ROWS = 0
    try:
        yield
    finally:
        packed_linear.FEW_ROWS = before
