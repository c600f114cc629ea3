"""Spreads the tokens of experts over their copies so that the fullest rank is as empty as possible.

Minimising the largest load of a rank is a linear program. It is solved without one: an expert takes its tokens back and pours them
over its ranks up to one level, the lowest that holds them; one expert after the other, again and again. Each pour lowers the sum of
squared loads, and the loads of least squares are also those with the smallest maximum, because the tokens of an expert can be split
at will. Sources: water filling; coordinate descent with over-relaxation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from crossdock_eplb_algos._shared.kernels.water_fill_native import NativeFill, native_reason
from crossdock_eplb_algos._shared.kernels.water_fill_torch import TorchFill
from crossdock_eplb_algos._shared.layer_copies import LayerCopies


class WaterFill:
    """The solver of one layer: in C on the CPU where a compiler is found, else in torch. Both give the same up to rounding."""

    def __init__(self, copies: LayerCopies, *, form: str = "auto") -> None:
        """``form``: ``auto``, ``native`` or ``torch``."""
        is_native = form != "torch" and copies.experts.device.type == "cpu" and not native_reason()
        self._fill: NativeFill | TorchFill = NativeFill(copies) if is_native else TorchFill([copies])

    @property
    def form(self) -> str:
        """``native`` or ``torch``."""
        return "native" if isinstance(self._fill, NativeFill) else "torch"

    def solve(self, tokens: torch.Tensor) -> torch.Tensor:
        """[E] tokens of each expert, on all ranks together -> [M, K] float64 tokens of each copy, 0 in padding."""
        return self._fill.solve(tokens)


def loads_of(copies: LayerCopies, tokens: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """[E] tokens and [..., M, K] tokens of copies -> [..., R] float64 tokens of each rank."""
    lead = shares.shape[:-2]
    loads = torch.zeros((*lead, copies.num_ranks + 1), dtype=torch.float64, device=tokens.device)
    fixed = copies.only_rank.expand(*lead, -1)
    loads.scatter_add_(-1, fixed, tokens.to(torch.float64).expand(*lead, -1))
    # The entry behind the last rank took the experts with a choice; they are counted by their copies instead.
    loads.scatter_add_(-1, copies.ranks.flatten().expand(*lead, -1), shares.flatten(-2).to(torch.float64))
    return loads[..., :-1]


def batched_fill(copies: Sequence[LayerCopies]) -> TorchFill:
    """The torch solver for many layers at once, for planning and measuring; a step solves layer by layer."""
    return TorchFill(copies)
