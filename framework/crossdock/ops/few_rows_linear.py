# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""``rows @ weight.T + bias`` for one row or a few on a GPU, where reading the matrix is all there is to do."""

from __future__ import annotations

import attrs
import torch

from crossdock.ops.early_launch import early_launch
from crossdock.ops.tile_size import block_of


@attrs.frozen(kw_only=True)
class LinearTile:
    """What a program takes at once."""

    columns: int
    inner: int
    warps: int


LINE_BYTES = 128
TILE = LinearTile(columns=4, inner=1024, warps=4)


def few_rows_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    tile: LinearTile = TILE,
) -> torch.Tensor:
    """[n, in] x [out, in] -> [n, out] in ``out_dtype``; accumulates in float32.

    Args:
        rows: n >= 1 rows with a contiguous last dimension.
        weight: contiguous, any floating dtype.
        bias: [out] or None.
        out_dtype: of the result.
        tile: see ``LinearTile``.
    """
    # Imported at the first call: CPU installations have no triton.
    from crossdock.ops.few_rows_linear_triton import few_rows_linear_kernel

    (num_rows, in_features), out_features = rows.shape, weight.shape[0]
    out = torch.empty(num_rows, out_features, dtype=out_dtype, device=rows.device)
    few_rows_linear_kernel[(-(-out_features // tile.columns),)](
        rows,
        weight,
        weight if bias is None else bias,
        out,
        out_features,
        in_features,
        rows.stride(0),
        num_rows=num_rows,
        rows_block=block_of(num_rows),
        block_out=tile.columns,
        block_in=tile.inner,
        num_lines=block_of(-(-in_features * weight.element_size() // LINE_BYTES)),
        has_bias=bias is not None,
        num_warps=tile.warps,
        **early_launch(rows),
    )
    return out
