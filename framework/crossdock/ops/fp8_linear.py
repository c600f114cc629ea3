"""A block-quantised matrix that is multiplied with rows step after step, in float8 where the device has it."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from crossdock.ops.fp8_block import num_blocks
from crossdock.ops.fp8_block_torch import BLOCK
from crossdock.ops.quantise_rows import quantise_rows_by_column


@attrs.frozen(kw_only=True)
class LinearTiles:
    """Launch of the kernel."""

    rows: int
    columns: int
    """At most 128 and a divisor of it: a tile has one column of scales."""
    group: int
    warps: int
    stages: int


FEW_ROWS = 64
"""Up to here rows keep their dtype: the product is bound by reading the weight, and quantising would be one more launch."""


def tiles_for(num_rows: int, out_features: int) -> LinearTiles:
    """A committed table; nothing is tuned at start."""
    if num_rows <= FEW_ROWS:
        rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
        # Narrow tiles where wide ones would leave multiprocessors idle.
        columns = 16 if out_features <= 4096 else 32 if out_features <= 8192 else 64
        return LinearTiles(rows=rows, columns=columns, group=1, warps=4, stages=4)
    if num_rows <= 512:
        return LinearTiles(rows=64, columns=64, group=8, warps=4, stages=4)
    return LinearTiles(rows=128, columns=128, group=8, warps=8, stages=4)


class Fp8Linear:
    """``rows @ dequantised(weight).T + bias``, weights in float8 blocks as a checkpoint has them; on a GPU."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """``weight`` [N, K] float8_e4m3fn, K a multiple of 128; ``scale`` [ceil(N / 128), K / 128] float32; ``bias`` [N] or None.

        Raises:
            ValueError: the shapes do not fit.
        """
        self.out_features, self.in_features = weight.shape
        needed = (num_blocks(self.out_features), self.in_features // BLOCK)
        if self.in_features % BLOCK or tuple(scale.shape) != needed:
            raise ValueError(
                f"fp8_linear: weight {tuple(weight.shape)} needs a width that is a multiple of {BLOCK} and scales {needed}, "
                f"found {tuple(scale.shape)}"
            )
        self._weight, self._scale, self._bias = weight.contiguous(), scale.contiguous(), bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, K] bf16 -> [n, N] bf16; zero rows are fine. Above ``FEW_ROWS`` rows are quantised on the way in."""
        out = fp8_linear_fused(rows, self._weight, self._scale, quantised=rows.shape[0] > FEW_ROWS)
        return out if self._bias is None else out.add_(self._bias)


def fp8_linear_fused(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, quantised: bool, tiles: LinearTiles | None = None
) -> torch.Tensor:
    """The kernel; ``quantised``: rows are brought to float8 first."""
    num_rows, out_features = rows.shape[0], weight.shape[0]
    out = torch.empty(num_rows, out_features, dtype=rows.dtype, device=rows.device)
    if num_rows == 0:
        return out
    # Imported at the first call: CPU installations have no triton.
    from crossdock.ops.fp8_linear_triton import fp8_linear_kernel

    tiles = tiles or tiles_for(num_rows, out_features)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    left, row_scales = quantise_rows_by_column(rows) if quantised else (rows, scale)
    launch: Any = fp8_linear_kernel
    launch[(-(-num_rows // tiles.rows) * -(-out_features // tiles.columns),)](
        left,
        row_scales,
        weight,
        scale,
        out,
        num_rows,
        out_features,
        weight.shape[1],
        left.stride(0),
        row_scales.stride(0),
        row_scales.stride(1),
        block_rows=tiles.rows,
        block_columns=tiles.columns,
        block=BLOCK,
        group=tiles.group,
        quantised=quantised,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out
