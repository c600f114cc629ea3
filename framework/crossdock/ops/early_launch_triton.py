# mypy: ignore-errors
# pyright: basic
"""What a kernel that was launched early says before it reads what the kernel before it wrote."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_inputs(is_early: tl.constexpr) -> None:
    """Waits for the launch before this one, then lets the next one come as far as this line.

    In that order: a kernel that stands here may then take for granted what was written two launches ago.
    """
    if is_early:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fetch_rows(first, rows, row_elements, num_lines: tl.constexpr) -> None:
    """Asks for the given rows of a matrix to be brought into L2, a line of 128 bytes at a time; the values are read later."""
    line_elements: tl.constexpr = 128 // (first.dtype.element_ty.primitive_bitwidth // 8)
    element = tl.minimum(tl.arange(0, num_lines) * line_elements, row_elements - 1)
    at = first + rows[:, None].to(tl.int64) * row_elements + element[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )
