# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""``store_rows``: this step's keys and values into the paged cache, one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from crossdock.errors import MisuseError
from crossdock.ops.early_launch import early_launch


def store_rows(slots: torch.Tensor, rows: Sequence[torch.Tensor], pools: Sequence[torch.Tensor]) -> None:
    """``pools[i]`` at flat slot ``slots[n]`` becomes ``rows[i][n]``, for one or two pools.

    Args:
        slots: [N] int64. Several rows may name a slot of the scratch page; which one stays there is not defined.
        rows: each [N, ...] with contiguous rows, any stride between them, in the pool's dtype.
        pools: each [pages, page_tokens, ...] contiguous.

    Raises:
        MisuseError: a row does not have the pool's size.
    """
    widths = [pool.shape[2:].numel() for pool in pools]
    if any(values.shape[1:].numel() != width for values, width in zip(rows, widths, strict=True)):
        raise MisuseError(
            f"rows {[list(values.shape) for values in rows]} do not fit pools {[list(p.shape) for p in pools]}"
        )
    if slots.shape[0] == 0:
        return
    # Imported at the first call: CPU installations have no triton.
    import triton

    from crossdock_attention.attention.triton.kernels.store_rows_triton import store_rows_kernel

    # Inside a row everything is contiguous: [N, width] with the stride of the first dimension.
    flat = [values.flatten(1) for values in rows]
    store_rows_kernel[(slots.shape[0],)](
        slots,
        flat[0],
        flat[-1],
        pools[0],
        pools[-1],
        widths[0],
        widths[-1],
        flat[0].stride(0),
        flat[-1].stride(0),
        block=triton.next_power_of_2(max(widths)),
        has_second=len(pools) > 1,
        num_warps=4,
        **early_launch(slots),
    )
