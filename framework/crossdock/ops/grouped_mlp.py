"""All local SwiGLU experts of a layer on rows by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from crossdock.errors import DispatchMisuse
from crossdock.ops.grouped_mlp_cpu import GroupedMlpKernel, unsupported_reason
from crossdock.ops.grouped_mlp_torch import grouped_mlp_rows, grouped_mlp_sorted, grouped_mlp_torch

GroupedMlpForm = Literal["native", "native_rows", "sorted", "loop", "loop_rows"]
"""``native``: one call of the C kernel; ``sorted``: rows by expert and torch's grouped product; ``loop``: the readable truth. In the two
``_rows`` forms a row's bits do not depend on the rows beside it: ``native_rows`` is the C kernel with one order of sums, ``loop_rows`` the loop for each row."""


class GroupedMlp:
    """One layer's experts, bound to their tensors by reference; nothing is copied, so an update in place is seen by the next call.

    Tensors: ``gate_up`` [S, 2I, H] (gate rows first), ``down`` [S, H, I], and for fp8 blocks their scales, as in ``ExpertTensors``.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], form: GroupedMlpForm) -> None:
        self._tensors = tensors
        self._form = form
        is_native = form in ("native", "native_rows")
        self._kernel = GroupedMlpKernel(tensors, row_invariant=form == "native_rows") if is_native else None

    def run(self, rows: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum over each row's local experts.

        Args:
            rows: [R, H] float32 or bfloat16, may be strided; not changed.
            local_ids: [R, K] int64, -1 = not here; such entries read nothing and add nothing.
            weights: [R, K] float32.

        Returns:
            [R, H] float32; rows without a local expert are exactly zero.

        Raises:
            DispatchMisuse: shapes do not belong together.
        """
        hidden_size = self._tensors["down"].shape[1]
        if rows.dim() != 2 or rows.shape[1] != hidden_size or local_ids.shape != weights.shape:
            raise DispatchMisuse(
                f"experts: rows {list(rows.shape)}, ids {list(local_ids.shape)}, weights {list(weights.shape)} must be "
                f"[R, {hidden_size}], [R, K] and [R, K]"
            )
        if self._kernel is not None:
            return self._kernel.run(rows, local_ids, weights)
        if self._form == "sorted":
            return grouped_mlp_sorted(rows, local_ids, weights, self._tensors)
        if self._form == "loop_rows":
            return grouped_mlp_rows(rows, local_ids, weights, self._tensors)
        return grouped_mlp_torch(rows, local_ids, weights, self._tensors)


def row_invariant_form(tensors: Mapping[str, torch.Tensor]) -> tuple[GroupedMlpForm, str]:
    """The faster of the forms that keep a row's bits its own, and why the C kernel was not taken (empty when it was).

    Measured on one core (512 x 256, top-4 of 32, float32): as fast as ``native`` up to 64 rows, 1.1 to 1.25 times its time above.
    """
    reason = unsupported_reason(tensors)
    return ("loop_rows" if reason else "native_rows"), reason


def best_form(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> tuple[GroupedMlpForm, str]:
    """The fastest form for these tensors here, and why a faster one was not taken (empty when there is none).

    Measured on one core (32 experts, top-4, 512 x 256, ``tests/benchmarks/bench_experts.py``): native is fastest from 1 to 2048 tokens in
    float32, bfloat16 and fp8 blocks.
    """
    reason = unsupported_reason(tensors)
    if not reason:
        return "native", ""
    gate_up, down = tensors["gate_up"], tensors["down"]
    # torch's grouped product wants aligned rows, and bfloat16 on a GPU.
    fits_device = gate_up.device.type == "cpu" or dtype is torch.bfloat16
    if gate_up.dtype is dtype and fits_device and gate_up.stride(1) % 8 == 0 and down.stride(1) % 8 == 0:
        return "sorted", reason
    return "loop", reason
