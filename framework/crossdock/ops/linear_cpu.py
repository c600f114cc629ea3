"""Product with a weight matrix for few rows, what a decode step does most, by the C kernel of ``cpu/linear.c``."""

from __future__ import annotations

import ctypes

import torch

from crossdock.native_code import native_code

_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_STEP = 32
_STREAMS = 4


class _Arguments(ctypes.Structure):
    """``struct linear`` of ``cpu/linear.c``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "row_stride")),
        ("kind", ctypes.c_int32),
    )


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """True when the kernel can compute this product: one thread, CPU, float32 or bfloat16, widths that fit its steps."""
    return (
        x.dtype is weight.dtype
        and x.dtype in _KINDS
        and not weight.is_cuda
        and torch.get_num_threads() == 1
        and x.stride(1) == 1
        and weight.is_contiguous()
        and weight.shape[1] % _STEP == 0
        and weight.shape[0] % _STREAMS == 0
        and native_code().library is not None
    )


def linear_cpu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[m, k] and [n, k] of one dtype -> [m, n] in that dtype, as ``torch.nn.functional.linear`` without a bias; only where ``takes``.

    The weight is read once, as it lies. A row's result does not depend on the other rows.
    """
    library = native_code().library
    assert library is not None, "takes() was asked first"
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype)
    arguments = _Arguments(
        rows=x.data_ptr(),
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        m=x.shape[0],
        n=weight.shape[0],
        k=weight.shape[1],
        row_stride=x.stride(0),
        kind=_KINDS[x.dtype],
    )
    if library.crossdock_linear(ctypes.byref(arguments)):
        raise MemoryError(f"linear: no memory for {x.shape[0]} rows of {weight.shape[0]}")
    return out
