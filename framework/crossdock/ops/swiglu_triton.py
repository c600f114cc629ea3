# mypy: ignore-errors
# pyright: basic
"""Triton kernel of ``swiglu``: one pass over gate and up halves."""

from __future__ import annotations

import triton
import triton.language as tl

from crossdock.ops.early_launch_triton import wait_for_inputs


@triton.jit
def swiglu_kernel(gate_up, out, inner_size, block: tl.constexpr, is_early: tl.constexpr) -> None:
    """out[row] = silu(gate) * up for ``block`` columns; the activation is rounded before the product, as two ops would."""
    wait_for_inputs(is_early)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < inner_size
    gate_at = gate_up + row * 2 * inner_size + column
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + inner_size, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * inner_size + column, (activated * up).to(out.dtype.element_ty), mask=inside)
