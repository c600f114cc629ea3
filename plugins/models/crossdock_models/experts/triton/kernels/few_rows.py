# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""``few_rows_swiglu``: experts on one row or a few, two launches."""

from __future__ import annotations

import attrs
import torch
from crossdock.ops.early_launch import early_launch
from crossdock.ops.few_rows_linear import LINE_BYTES
from crossdock.ops.tile_size import block_of


@attrs.frozen(kw_only=True)
class FewTile:
    """Columns and inner elements that a program takes at once, of both products."""

    gate_columns: int
    gate_inner: int
    gate_warps: int
    down_columns: int
    down_inner: int
    down_warps: int


ONE_ROW_TILE = FewTile(gate_columns=4, gate_inner=512, gate_warps=4, down_columns=8, down_inner=1024, down_warps=8)
FEW_TILE = FewTile(gate_columns=8, gate_inner=256, gate_warps=4, down_columns=8, down_inner=256, down_warps=4)
MOST_ROWS = 4
EXPERTS_A_PAIR = 4
"""With fewer experts for each (row, choice) pair, rows begin to share experts, and each matrix should be read once for all of them."""


def are_few(local_ids: torch.Tensor, num_experts: int) -> bool:
    """Whether [R, K] choices among ``num_experts`` hardly ever meet."""
    return local_ids.shape[0] <= MOST_ROWS and local_ids.numel() * EXPERTS_A_PAIR <= num_experts


def few_rows_swiglu(
    rows: torch.Tensor,
    local_ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    tile: FewTile | None = None,
) -> torch.Tensor:
    """rows [R, H], local_ids [R, K] int64 (-1 = none), weights [R, K] float32, all contiguous -> [R, H] as ``grouped_swiglu``.

    gate_up [S, 2I, H] gate rows first, down [S, H, I], both contiguous and not quantised.
    """
    # Imported at the first call: CPU installations have no triton.
    from crossdock_models.experts.triton.kernels.few_rows_triton import few_down_kernel, few_gate_up_kernel

    num_rows, top_k = local_ids.shape
    tile = tile or (ONE_ROW_TILE if num_rows == 1 else FEW_TILE)
    hidden_size, inner_size = down.shape[1], down.shape[2]
    activated = torch.empty(num_rows * top_k, inner_size, dtype=rows.dtype, device=rows.device)
    few_gate_up_kernel[(-(-inner_size // tile.gate_columns), num_rows * top_k)](
        rows,
        gate_up,
        local_ids,
        activated,
        hidden_size,
        inner_size,
        top_k,
        block_columns=tile.gate_columns,
        block_inner=tile.gate_inner,
        num_warps=tile.gate_warps,
        **early_launch(rows),
    )
    out = torch.empty_like(rows)
    few_down_kernel[(-(-hidden_size // tile.down_columns), num_rows)](
        activated,
        down,
        local_ids,
        weights,
        out,
        hidden_size,
        inner_size,
        top_k=top_k,
        block_columns=tile.down_columns,
        block_inner=tile.down_inner,
        num_lines=block_of(-(-inner_size * down.element_size() // LINE_BYTES)),
        num_warps=tile.down_warps,
        **early_launch(rows),
    )
    return out
