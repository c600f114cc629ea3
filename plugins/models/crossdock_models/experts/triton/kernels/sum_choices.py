# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""The way back from places: the weighted sum of a row's choices."""

from __future__ import annotations

import torch
from crossdock.ops.early_launch import early_launch

from crossdock_models.experts.triton.kernels.block_order import BlockOrder


def sum_choices(parts: torch.Tensor, order: BlockOrder, weights: torch.Tensor) -> torch.Tensor:
    """Rows of ``parts`` in the order of blocks back to one a token: weight [R, K] times part of the choices that are here, in the order of k."""
    # Imported at the first call: CPU installations have no triton.
    import triton

    from crossdock_models.experts.triton.kernels.grouped_swiglu_triton import sum_choices_kernel

    (num_rows, top_k), hidden_size = weights.shape, parts.shape[1]
    out = torch.empty(num_rows, hidden_size, dtype=parts.dtype, device=parts.device)
    block = min(1024, triton.next_power_of_2(hidden_size))
    sum_choices_kernel[(num_rows, triton.cdiv(hidden_size, block))](
        parts, order.places, weights, out, hidden_size, top_k=top_k, block=block, num_warps=4, **early_launch(parts)
    )
    return out
