"""Between the two products: SwiGLU on placed rows and the float8 form of its result; and that form of rows that came in their places."""

from __future__ import annotations

from typing import Any

import torch
from crossdock.ops.fp8_block_torch import BLOCK

from crossdock_models.experts.deep_gemm.kernels.move_rows import scale_strides, scales_of
from crossdock_models.experts.deep_gemm.kernels.places import Places

PROGRAM_BLOCKS = 8
"""Blocks of 128 elements of a row that a program handles together; a power of two."""
SEGMENT_PROGRAM_ROWS = 8
"""Rows of a segment that a program handles one after the other; divides 128."""
PROGRAMS_PER_EXPERT = 16
"""Programs that share the live places of an expert."""


def swiglu_places(
    gate_up: torch.Tensor, places: Places, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``silu(gate) * up`` of live places, float32 inside.

    Args:
        gate_up: [P, 2I], gate columns first; I a multiple of 128.
        places: which of the P are live.
        dtype: of the result: float8_e4m3fn with scales, or that of ``gate_up``.

    Returns:
        [P, I] and, for float8, scales of ``scales_of``; both unwritten in places that are not live.
    """
    return _launch(gate_up, places, dtype, gate_up.shape[1] // 2, gated=True)


def quantise_places(rows: torch.Tensor, places: Places) -> tuple[torch.Tensor, torch.Tensor]:
    """Live places of [P, H] as float8_e4m3fn with scales of ``scales_of``."""
    payload, scales = _launch(rows, places, torch.float8_e4m3fn, rows.shape[1], gated=False)
    assert scales is not None, "float8 has scales"
    return payload, scales


def _launch(
    source: torch.Tensor, places: Places, dtype: torch.dtype, width: int, *, gated: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    out = torch.empty(places.num_places, width, dtype=dtype, device=source.device)
    num_blocks = width // BLOCK
    scales = scales_of(places, num_blocks) if dtype is torch.float8_e4m3fn else None
    if places.num_places == 0:
        return out, scales
    # Imported at the first call: CPU installations have no triton.
    from crossdock_models.experts.deep_gemm.kernels.activate_triton import activate_kernel

    in_segments = places.groups is not None
    if in_segments:
        programs = places.num_places // SEGMENT_PROGRAM_ROWS
    else:
        programs = places.num_places // places.capacity * PROGRAMS_PER_EXPERT
    launch: Any = activate_kernel
    launch[(programs, -(-num_blocks // PROGRAM_BLOCKS))](
        source,
        places.groups if in_segments else places.counts,
        out,
        out if scales is None else scales,
        num_blocks,
        places.capacity,
        *scale_strides(scales),
        blocks=PROGRAM_BLOCKS,
        block=BLOCK,
        gated=gated,
        quantise=scales is not None,
        in_segments=in_segments,
        shared_by=SEGMENT_PROGRAM_ROWS if in_segments else PROGRAMS_PER_EXPERT,
        num_warps=4,
    )
    return out, scales
