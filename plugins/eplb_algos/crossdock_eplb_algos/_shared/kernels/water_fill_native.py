"""Water filling in C, for one layer on the CPU: a decode step has no time for a hundred operators a layer."""

from __future__ import annotations

import ctypes
import functools
import shutil
from pathlib import Path

import torch
from crossdock.native_code import NativeCode, build_native_code, cache_folder

from crossdock_eplb_algos._shared.kernels.water_fill_torch import (
    MAX_SWEEPS,
    OVERSHOOT,
    SWEEPS_BETWEEN_CHECKS,
    TOLERANCE,
)
from crossdock_eplb_algos._shared.layer_copies import LayerCopies

_SOURCE = Path(__file__).parent / "water_fill.c"
_COMPILERS = ("cc", "gcc", "clang")


@functools.cache
def _native() -> NativeCode:
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        return NativeCode(library=None, reason=f"no C compiler found ({', '.join(_COMPILERS)})")
    return build_native_code(compiler, cache_folder(), (_SOURCE,))


def native_reason() -> str:
    """Why the C form cannot be used on this machine; empty when it can."""
    code = _native()
    return "" if code.library is not None else code.reason


class NativeFill:
    """The kernel bound to one layer."""

    def __init__(self, copies: LayerCopies) -> None:
        library = _native().library
        if library is None:
            raise ValueError(f"water_fill: {native_reason()}; take the torch form")
        self._copies = copies
        self._function = library.crossdock_water_fill
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self._function.argtypes = [pointer] * 4 + [integer] * 5 + [ctypes.c_double] * 2
        self._function.restype = ctypes.c_int64

    def solve(self, tokens: torch.Tensor) -> torch.Tensor:
        """[E] -> [N, K] float64."""
        copies = self._copies
        flat = tokens.to(torch.float64)
        loads = torch.zeros(copies.num_ranks + 1, dtype=torch.float64)
        loads.index_add_(0, copies.only_rank, flat)
        poured = flat[copies.experts]
        shares = torch.zeros(copies.ranks.shape, dtype=torch.float64)
        rows, width = shares.shape
        addresses = (poured.data_ptr(), copies.ranks.data_ptr(), loads.data_ptr(), shares.data_ptr())
        numbers = (rows, width, copies.num_ranks, MAX_SWEEPS, SWEEPS_BETWEEN_CHECKS)
        if self._function(*addresses, *numbers, TOLERANCE, OVERSHOOT) < 0:
            raise MemoryError(f"water_fill: no memory for {rows} experts with {width} copies")
        return shares
