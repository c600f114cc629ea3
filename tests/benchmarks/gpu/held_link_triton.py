# mypy: ignore-errors
"""One thread block that watches the clock."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["nanoseconds"])
def hold_kernel(sink, nanoseconds):
    """Ends so many nanoseconds after it began; ``sink`` keeps the loop from being dropped."""
    begun = globaltimer()
    now = begun
    while now - begun < nanoseconds:
        now = globaltimer()
    tl.store(sink, now)
