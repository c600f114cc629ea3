"""Gated activation by the C kernel of ``cpu/swiglu.c``."""

from __future__ import annotations

import ctypes

import torch

from crossdock.native_code import native_code


class _Arguments(ctypes.Structure):
    """``struct swiglu`` of ``cpu/swiglu.c``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "out")),
        *((name, ctypes.c_int64) for name in ("n", "inner", "row_stride")),
    )


def takes(gate_up: torch.Tensor) -> bool:
    """True when the kernel can run on these rows: two dimensions, float32, on the CPU."""
    return (
        gate_up.dim() == 2
        and gate_up.dtype is torch.float32
        and gate_up.device.type == "cpu"
        and gate_up.stride(1) == 1
        and native_code().library is not None
    )


def swiglu_cpu(gate_up: torch.Tensor) -> torch.Tensor:
    """[n, 2I], gate half first -> [n, I], new; only where ``takes``. An element's bits depend on its gate and up alone."""
    library = native_code().library
    assert library is not None, "takes() was asked first"
    num_rows, inner_size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, inner_size))
    arguments = _Arguments(
        rows=gate_up.data_ptr(), out=out.data_ptr(), n=num_rows, inner=inner_size, row_stride=gate_up.stride(0)
    )
    library.crossdock_swiglu(ctypes.byref(arguments))
    return out
