"""Proves on ranks that a strategy gives the bits of ``sequential``: for strategies of ours and of third parties.

Bits can be equal only where a row's result does not depend on the rows beside it: what ``launch.row_invariant`` gives every user.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from crossdock.testing.model_driver import ModelDriver, Work
from crossdock.testing.model_parts import DriverChoice
from crossdock.testing.world import RankContext
from crossdock.types.parallel import ParallelSizes


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
    choice = attrs.evolve(choice, row_invariant=True)
    plain = attrs.evolve(choice, strategy="sequential", strategy_options={})
    comms = context.comms_of(sizes)
    ours, theirs = (ModelDriver(each, sizes, context.place(sizes), comms) for each in (choice, plain))
    differences: list[str] = []
    for number, work in enumerate(steps):
        found, wanted = ours.step(work), theirs.step(work)
        for sequence, rows in wanted.items():
            if not torch.equal(found[sequence], rows):
                largest = float((found[sequence] - rows).abs().max())
                differences.append(f"step {number}, sequence {sequence}: {largest:.2e}")
    return OverlapFinding(reasons=tuple(ours.overlap_reasons), differences=tuple(differences))
