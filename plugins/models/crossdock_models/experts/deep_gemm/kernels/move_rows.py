"""Copies each row to the places of its experts, quantising on the way where the product wants float8."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from crossdock.ops.fp8_block_torch import BLOCK

from crossdock_models.experts.deep_gemm.kernels.places import Places

PROGRAM_BLOCKS = 8
"""Blocks of 128 elements that a program moves; a power of two."""


@attrs.frozen(kw_only=True, eq=False)
class PlacedRows:
    """Rows in their places; what lies in other places is unwritten."""

    rows: torch.Tensor
    """[P, H]."""
    scales: torch.Tensor | None
    """Of float8 rows: [P, H / 128] or [S, capacity, H / 128] float32 with contiguous columns, as ``scales_of`` makes them."""
    positions: torch.Tensor
    """[R, K] int32 place of each pair, -1 where there is none."""


def scales_of(places: Places, num_blocks: int) -> torch.Tensor:
    """Unwritten scales by column: one column after the other, of every expert alone where experts have a capacity."""
    device = places.counts.device
    if places.capacity == 0:
        return torch.empty(num_blocks, places.num_places, dtype=torch.float32, device=device).t()
    experts = places.num_places // places.capacity
    return torch.empty(experts, num_blocks, places.capacity, dtype=torch.float32, device=device).mT


def move_rows(
    rows: torch.Tensor, scales: torch.Tensor | None, local_ids: torch.Tensor, places: Places, dtype: torch.dtype
) -> PlacedRows:
    """Rows to the places of their experts.

    Args:
        rows: [R, H] bf16, fp16, fp32 or float8_e4m3fn; H a multiple of 128.
        scales: [R, H / 128] float32 of float8 rows, else None.
        local_ids: [R, K] int64, -1 = none.
        places: of ``local_ids``.
        dtype: of the placed rows: float8_e4m3fn, or that of ``rows``.
    """
    num_rows, hidden_size = rows.shape
    top_k, num_blocks = local_ids.shape[1], hidden_size // BLOCK
    to_fp8 = dtype is torch.float8_e4m3fn
    placed = torch.empty(places.num_places, hidden_size, dtype=dtype, device=rows.device)
    placed_scales = scales_of(places, num_blocks) if to_fp8 else None
    positions = torch.empty(num_rows, top_k, dtype=torch.int32, device=rows.device)
    if num_rows:
        # Imported at the first call: CPU installations have no triton.
        from crossdock_models.experts.deep_gemm.kernels.move_rows_triton import move_rows_kernel

        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        given = None if scales is None else scales.contiguous()
        launch: Any = move_rows_kernel
        launch[(num_rows, -(-num_blocks // PROGRAM_BLOCKS))](
            rows,
            rows if given is None else given,
            local_ids.contiguous(),
            places.ranks,
            places.starts,
            placed,
            placed if placed_scales is None else placed_scales,
            positions,
            num_blocks,
            places.capacity,
            rows.stride(0),
            *scale_strides(placed_scales),
            top_k=top_k,
            blocks=PROGRAM_BLOCKS,
            block=BLOCK,
            quantise=to_fp8 and scales is None,
            has_scales=scales is not None,
            num_warps=4,
        )
    return PlacedRows(rows=placed, scales=placed_scales, positions=positions)


def scale_strides(scales: torch.Tensor | None) -> tuple[int, int]:
    """Strides between experts and between columns of ``scales_of``; zeros where there are none."""
    if scales is None:
        return 0, 0
    return (scales.stride(0) if scales.dim() == 3 else 0), scales.stride(-1)
