# mypy: ignore-errors
"""Triton kernel of ``swiglu_places`` and ``quantise_places``."""

from __future__ import annotations

import triton
import triton.language as tl
from crossdock.ops.quantise_rows_triton import block_scales


@triton.jit(do_not_specialize=["capacity"])
def activate_kernel(
    # pointers
    source,
    live,
    out,
    scales,
    # sizes
    num_blocks,
    capacity,
    # strides
    scale_expert_stride,
    scale_block_stride,
    # meta
    blocks: tl.constexpr,
    block: tl.constexpr,
    gated: tl.constexpr,
    quantise: tl.constexpr,
    in_segments: tl.constexpr,
    shared_by: tl.constexpr,
) -> None:
    # 64 bits: places times columns pass 2**31 in a large prefill.
    program = tl.program_id(0).to(tl.int64)
    # Rows of this program: neighbours inside a segment, or every ``shared_by``-th live place of an expert.
    if in_segments:
        expert = 0
        first = program * shared_by
        stop = tl.where(tl.load(live + first) >= 0, first + shared_by, first)
        step = 1
    else:
        expert = program // shared_by
        first = expert * capacity + program % shared_by
        stop = expert * capacity + tl.load(live + expert)
        step = shared_by
    index = tl.program_id(1) * blocks + tl.arange(0, blocks)
    inside = (index < num_blocks)[:, None]
    columns = index[:, None] * block + tl.arange(0, block)[None, :]
    width = num_blocks * block
    for row in range(first, stop, step):
        if gated:
            gate = tl.load(source + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(source + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
            values = gate / (1.0 + tl.exp(-gate)) * up
        else:
            values = tl.load(source + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        if quantise:
            found = block_scales(values)
            values = values / found[:, None]
            at = expert * scale_expert_stride + index * scale_block_stride + row - expert * capacity
            tl.store(scales + at, found, mask=index < num_blocks)
        tl.store(out + row * width + columns, values.to(out.dtype.element_ty), mask=inside)
