"""Weights of one layer's experts as the kernels take them."""

from __future__ import annotations

import attrs
import torch
from crossdock.ops.early_launch import has_early_launch
from crossdock.ops.fp8_block_torch import BLOCK

from crossdock_models.experts.triton.kernels.grouped_large import LARGE_TILES
from crossdock_models.experts.triton.kernels.hopper_products import Factor, takes_hopper
from crossdock_models.experts.triton.kernels.tiles import MOST_MIDDLING_ROWS


@attrs.frozen(kw_only=True, eq=False)
class GroupedWeights:
    """Weights of one layer: S experts, I inner, H hidden. Scales only for float8 weights."""

    gate_up: torch.Tensor
    """[S, 2I, H] contiguous, gate rows first."""
    down: torch.Tensor
    """[S, H, I] contiguous."""
    gate_up_scale: torch.Tensor | None = None
    """[S, 2 * ceil(I / 128), ceil(H / 128)] float32."""
    down_scale: torch.Tensor | None = None
    """[S, ceil(H / 128), ceil(I / 128)] float32."""

    @property
    def num_experts(self) -> int:
        return self.down.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.down.shape[1]

    @property
    def inner_size(self) -> int:
        return self.down.shape[2]

    @property
    def is_quantised(self) -> bool:
        return self.gate_up_scale is not None

    def takes_large(self, rows_per_expert: float) -> bool:
        """Many rows, weights of two bytes, and whole steps along the summed dimensions."""
        is_whole = self.hidden_size % LARGE_TILES.inner == 0 and self.inner_size % LARGE_TILES.inner == 0
        return rows_per_expert > MOST_MIDDLING_ROWS and is_whole and self.down.element_size() == 2

    @property
    def takes_fp8(self) -> bool:
        """Float8 weights of whole blocks of scales, where tensor cores multiply float8 from shared memory."""
        is_whole = self.hidden_size % BLOCK == 0 and self.inner_size % BLOCK == 0
        return self.is_quantised and is_whole and self.down.is_cuda and has_early_launch(self.down.get_device())

    @property
    def takes_hopper(self) -> bool:
        """Sizes, weights and device for the products of many rows on Hopper."""
        return takes_hopper(self.down, self.hidden_size, self.inner_size)

    @property
    def factors(self) -> tuple[Factor, Factor]:
        """(gate and up, down)."""
        return (
            Factor(values=self.gate_up, scales=self.gate_up_scale),
            Factor(values=self.down, scales=self.down_scale),
        )
