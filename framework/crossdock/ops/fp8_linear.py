"""A block-quantised matrix that is multiplied with rows step after step, in float8 where the device has it."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch.nn import functional

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


FEW_ROWS = 16
"""Up to here rows keep their dtype: the product is bound by reading the weight, and quantising would be one more launch."""
SCALE_ALIGN = 4
"""torch's block-scaled product wants this many, or a multiple of it, scales in a row of weight blocks."""


def tiles_for(num_rows: int, out_features: int) -> LinearTiles:
    """The best of ``tests/benchmarks/gpu/fp8_linear.py`` on an H200; nothing is tuned at start."""
    if num_rows <= FEW_ROWS:
        return LinearTiles(rows=16, columns=32 if out_features <= 8192 else 64, group=1, warps=4, stages=4)
    if num_rows <= 256:
        return LinearTiles(rows=64, columns=64, group=8, warps=4, stages=4)
    return LinearTiles(rows=128, columns=128, group=8, warps=8, stages=4)


class Fp8Linear:
    """``rows @ dequantised(weight).T + bias``, weights in float8 blocks as a checkpoint has them; on a GPU.

    A few rows go through our kernel in their own dtype. More are quantised by blocks and go through torch's block-scaled product on Hopper,
    1.4 to 1.5 times as fast as bf16 and 1.6 times our kernel at 4,096 rows, and through our kernel elsewhere.
    """

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
        self._padded_scale = padded_scale(scale)
        self._uses_torch = self.out_features % 16 == 0 and has_block_product(weight.device)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, K] bf16 -> [n, N] bf16; zero rows are fine. Above ``FEW_ROWS`` rows are quantised on the way in."""
        quantised = rows.shape[0] > FEW_ROWS
        if quantised and self._uses_torch:
            out = block_product(rows, self._weight, self._padded_scale)
        else:
            out = fp8_linear_fused(rows, self._weight, self._scale, quantised=quantised)
        return out if self._bias is None else out.add_(self._bias)


def has_block_product(device: torch.device) -> bool:
    """Whether torch's product with scales by block runs: it needs Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def padded_scale(scale: torch.Tensor) -> torch.Tensor:
    """The same scales with zeros behind each row, up to a multiple of ``SCALE_ALIGN``."""
    rows, columns = scale.shape
    padded = scale.new_zeros(rows, -(-columns // SCALE_ALIGN) * SCALE_ALIGN)
    padded[:, :columns] = scale
    return padded


def block_product(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """torch's product: [n, K] bf16 and [N, K] float8 with scales of ``padded_scale`` -> [n, N] bf16; rows are quantised here."""
    payload, row_scales = quantise_rows_by_column(rows)
    out = functional.scaled_mm(
        payload,
        weight.t(),
        row_scales,
        functional.ScalingType.BlockWise1x128,
        scale.t(),
        functional.ScalingType.BlockWise128x128,
    )
    return out[: rows.shape[0]]


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
