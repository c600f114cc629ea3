"""Product with float32 weights for rows of any dtype: router logits, whose near ties must not fall another way in bf16."""

from __future__ import annotations

import torch

from crossdock.ops.few_rows_linear import few_rows_linear
from crossdock.ops.packed_linear import PackedLinear

FEW_ROWS = 4
"""Up to here a router's product is faster without tensor cores (H200, 128 x 2048: 2.4 to 3.0 against 4.9 us)."""


class FloatLinear:
    """``rows @ weight.T`` with float32 weights and a float32 result.

    For bf16 rows on a GPU the tensor cores can do it: rows are exact in bf16 and products accumulate in float32. A weight that is not exact
    in bf16 is kept as a sum of two bf16 matrices, which hold 16 bits of its 24. Elsewhere it is a float32 product.
    """

    def __init__(self, weight: torch.Tensor, rows_dtype: torch.dtype) -> None:
        """``weight`` [out, in] float32."""
        self._split = weight.is_cuda and rows_dtype == torch.bfloat16
        self._out_features = weight.shape[0]
        if self._split:
            high = weight.to(torch.bfloat16)
            low = (weight - high.float()).to(torch.bfloat16)
            self._is_exact = not bool(low.any())
            self._parts = high if self._is_exact else torch.cat((high, low))
        else:
            self._linear = PackedLinear(weight)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, in] -> [n, out] float32."""
        if not self._split:
            return self._linear(rows.float())
        if self._is_exact and 0 < rows.shape[0] <= FEW_ROWS:
            return few_rows_linear(rows, self._parts, None, torch.float32)
        parts = torch.mm(rows, self._parts.T, out_dtype=torch.float32)
        if self._is_exact:
            return parts
        return parts[:, : self._out_features] + parts[:, self._out_features :]
