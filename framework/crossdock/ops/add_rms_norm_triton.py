# mypy: ignore-errors
# pyright: basic
"""Triton kernel of ``add_rms_norm``: sum and norm of a row in one pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl

from crossdock.ops.early_launch_triton import wait_for_inputs


@triton.jit(do_not_specialize=["eps"])
def add_rms_norm_kernel(
    # pointers
    residual,
    update,
    weight,
    total,
    normed,
    # sizes
    hidden_size,
    eps,
    # meta
    block: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    """One program a row: residual + update to ``total``, its norm times ``weight`` to ``normed``."""
    wait_for_inputs(is_early)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < hidden_size
    at = row * hidden_size + column
    # Sum, rounded to the stream's dtype before the norm, as two separate ops would.
    x = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(update + at, mask=inside, other=0.0).to(tl.float32)
    x = x.to(total.dtype.element_ty)
    tl.store(total + at, x, mask=inside)
    # Norm.
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / hidden_size + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, (x * scale * gain).to(normed.dtype.element_ty), mask=inside)
