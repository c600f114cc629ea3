"""The way back: the weighted sum of a row's outputs, from their places."""

from __future__ import annotations

from typing import Any

import torch

PROGRAM_COLUMNS = 1024
"""Elements of a row that a program sums; a power of two."""


def sum_choices(out: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[P, H] outputs, positions [R, K] int32 (-1 adds nothing), weights [R, K] float32 -> [R, H] in the dtype of ``out``.

    Summed in float32 in the order of k; rows without a place are exactly zero.
    """
    (num_rows, top_k), hidden_size = positions.shape, out.shape[1]
    total = torch.empty(num_rows, hidden_size, dtype=out.dtype, device=out.device)
    if num_rows:
        # Imported at the first call: CPU installations have no triton.
        from crossdock_models.experts.deep_gemm.kernels.sum_choices_triton import sum_choices_kernel

        launch: Any = sum_choices_kernel
        launch[(num_rows, -(-hidden_size // PROGRAM_COLUMNS))](
            out, positions, weights.contiguous(), total, hidden_size, top_k=top_k, block=PROGRAM_COLUMNS, num_warps=4
        )
    return total
