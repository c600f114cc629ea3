"""Spreads the tokens of experts over their copies so that the fullest rank is as empty as possible.

Minimising the largest load of a rank is a linear program. It is solved without one: an expert takes its tokens back and pours them
over its ranks up to one level, the lowest that holds them; one expert after the other, again and again. Each pour lowers the sum of
squared loads, and the loads of least squares are also those with the smallest maximum, because the tokens of an expert can be split
at will. Sources: water filling; coordinate descent with over-relaxation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from crossdock_eplb_algos._shared.copy_table import CopyTable
from crossdock_eplb_algos._shared.kernels.water_fill_native import NativeFill, native_reason
from crossdock_eplb_algos._shared.kernels.water_fill_torch import TorchFill
from crossdock_eplb_algos._shared.layer_copies import LayerCopies


class WaterFill:
    """The solver of one layer on the CPU: in C where a compiler is found, else in torch. Both give the same up to rounding."""

    def __init__(self, copies: LayerCopies, *, form: str = "auto") -> None:
        """``form``: ``auto``, ``native`` or ``torch``."""
        is_native = form != "torch" and not native_reason()
        self._fill: NativeFill | TorchFill = NativeFill(copies) if is_native else TorchFill([copies])

    @property
    def form(self) -> str:
        """``native`` or ``torch``."""
        return "native" if isinstance(self._fill, NativeFill) else "torch"

    def solve(self, tokens: torch.Tensor) -> torch.Tensor:
        """[E] tokens of each expert, on all ranks together -> [N, K] float64 tokens of each copy, 0 in padding."""
        return self._fill.solve(tokens)


def shares_of_table(copies: LayerCopies, shares: torch.Tensor, table: CopyTable) -> torch.Tensor:
    """[N, K] tokens of copies, as a solver gives them -> [M, R] float32, as the table has them."""
    flat = torch.zeros(table.slots.numel() + 1, dtype=torch.float32)
    flat.scatter_(0, copies.places.view(-1), shares.view(-1).to(torch.float32))
    return flat[:-1].view(table.slots.shape)


def batched_fill(copies: Sequence[LayerCopies]) -> TorchFill:
    """The torch solver for many layers at once, for planning and measuring; a step solves layer by layer."""
    return TorchFill(copies)
