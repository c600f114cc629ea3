"""A matrix that is multiplied with rows step after step, kept in the form that the device likes best."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from crossdock.ops.few_rows_linear import few_rows_linear
from crossdock.ops.linear_cpu import linear_cpu, takes
from crossdock.ops.packed_linear_cpu import CpuLinear, packs

PACK_ROWS_HINT = 64
"""Rows that oneDNN lays the weight out for. Measured on Zen 4, 1 thread, 768x512 and 8192x512: 1.1 to 2.4 times as fast as
``functional.linear`` from 1 to 4096 rows; a hint of 1 loses half of it."""


FEW_ROWS = 4
"""Up to here the C kernel that reads the plain bf16 weight wins, at one row by a factor of two."""


STREAMED_COLUMNS = 2048
"""Up to here a product with one row is faster without tensor cores: more columns give cuBLAS enough to do (H200: 8.0 against 8.9 us for
4096 x 2048, 9.4 against 8.3 us for 2048 x 5120)."""


class PackedLinear:
    """``rows @ weight.T + bias``.

    On a CPU the weight is repacked once, instead of at each call: in float32 for a C kernel that gives a row the same bits whatever rows are
    beside it, else for torch's oneDNN. The plain bf16 form is kept beside oneDNN's for a few rows where another C kernel can use it: a second
    copy of the projections, which are a small part of a MoE model, and never of its experts.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """``weight`` [out, in] fp32 or bf16; ``bias`` [out] or None."""
        if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            raise ValueError(
                f"linear: weight {tuple(weight.shape)} and bias {None if bias is None else tuple(bias.shape)} do not fit"
            )
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._cpu = CpuLinear(weight, bias) if packs(weight) else None
        self._is_packed = (
            self._cpu is None and weight.numel() > 0 and weight.device.type == "cpu" and can_pack(weight.dtype)
        )
        # The C kernel has a copy of its own.
        kept = weight if self._cpu is None else weight.new_empty(0)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS_HINT) if self._is_packed else kept
        self._is_streamed = (
            weight.is_cuda and weight.is_contiguous() and weight.numel() > 0 and self.out_features <= STREAMED_COLUMNS
        )
        self._plain = weight if self._is_packed and takes(weight[:0], weight) else None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, in] -> [n, out], new; zero rows are fine."""
        if self._cpu is not None:
            return self._cpu(rows)
        if self._plain is not None and 0 < rows.shape[0] <= FEW_ROWS and takes(rows, self._plain):
            few = linear_cpu(rows, self._plain)
            return few if self._bias is None else few.add_(self._bias)
        if self._is_packed:
            packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
            return packed
        if self._is_streamed and rows.shape[0] == 1:
            return few_rows_linear(rows, self._weight, self._bias, rows.dtype)
        return functional.linear(rows, self._weight, self._bias)

    def in_float32(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, in] -> [n, out] float32. On a GPU the sums are never rounded to bf16, and not written twice."""
        if self._bias is None and rows.is_cuda and rows.dtype is torch.bfloat16:
            return torch.mm(rows, self._weight.T, out_dtype=torch.float32)
        return self(rows).float()


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether torch's oneDNN operators are there and right. They are private, so they are tried on a small case before they are trusted."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    weight = torch.arange(-12, 12, dtype=torch.float32).view(4, 6).to(dtype)
    rows = torch.arange(6, dtype=torch.float32).view(1, 6).to(dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS_HINT)
        found = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(found, functional.linear(rows, weight))
