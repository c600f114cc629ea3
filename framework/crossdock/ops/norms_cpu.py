"""Row norms and rotations by the C kernels of ``cpu/norms.c``: one pass where torch takes six to ten operators."""

from __future__ import annotations

import ctypes

import torch

from crossdock.native_code import native_code

_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_DIM_STEP = 16
"""What the widest vector unit reads at once."""
MOST_THREADS = 2
"""The kernels use one thread; torch's operators on more of them catch up."""


class _AddRmsNorm(ctypes.Structure):
    """``struct add_rms_norm`` of ``cpu/norms.c``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("residual", "update", "weight", "total", "out")),
        *((name, ctypes.c_int64) for name in ("n", "h", "residual_stride", "update_stride")),
        ("eps", ctypes.c_float),
        ("kind", ctypes.c_int32),
    )


class _NormRotate(ctypes.Structure):
    """``struct norm_rotate`` of ``cpu/norms.c``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "weight", "rotation", "out")),
        *((name, ctypes.c_int64) for name in ("n", "heads", "dim", "row_stride", "head_stride")),
        ("eps", ctypes.c_float),
        ("kind", ctypes.c_int32),
    )


def takes(rows: torch.Tensor, *others: torch.Tensor | None, most_threads: int = MOST_THREADS) -> bool:
    """True when the kernels can run on these tensors of one dtype: on the CPU, last dimensions contiguous, whole vectors.

    With more than ``most_threads`` torch is left to it.
    """
    return (
        rows.dtype in _KINDS
        and not rows.is_cuda
        and rows.shape[-1] % _DIM_STEP == 0
        and rows.stride(-1) == 1
        and all(x is None or (x.dtype is rows.dtype and x.stride(-1) == 1) for x in others)
        and torch.get_num_threads() <= most_threads
        and native_code().library is not None
    )


def rms_norm_cpu(rows: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """[n, h] -> [n, h]; only where ``takes(rows, weight)``."""
    return _add_rms_norm(rows, None, weight, eps)[1]


def add_rms_norm_cpu(
    residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Total and normed total, both [n, h]; only where ``takes(residual, update, weight)``."""
    return _add_rms_norm(residual, update, weight, eps)


def _add_rms_norm(
    residual: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    library = native_code().library
    assert library is not None, "takes() was asked first"
    out = torch.empty(residual.shape, dtype=residual.dtype)
    total = residual if update is None else torch.empty(residual.shape, dtype=residual.dtype)
    arguments = _AddRmsNorm(
        residual=residual.data_ptr(),
        update=None if update is None else update.data_ptr(),
        weight=None if weight is None else weight.data_ptr(),
        total=total.data_ptr(),
        out=out.data_ptr(),
        n=residual.shape[0],
        h=residual.shape[1],
        residual_stride=residual.stride(0),
        update_stride=0 if update is None else update.stride(0),
        eps=eps,
        kind=_KINDS[residual.dtype],
    )
    library.crossdock_add_rms_norm(ctypes.byref(arguments))
    return total, out


def norm_rotate_cpu(
    rows: torch.Tensor, weight: torch.Tensor | None, eps: float, rotation: torch.Tensor
) -> torch.Tensor:
    """[n, heads, dim] -> the same, new; ``rotation`` [n, 1, dim / 2] complex64, contiguous; only where ``takes(rows, weight)``."""
    library = native_code().library
    assert library is not None, "takes() was asked first"
    out = torch.empty(rows.shape, dtype=rows.dtype)
    arguments = _NormRotate(
        rows=rows.data_ptr(),
        weight=None if weight is None else weight.data_ptr(),
        rotation=rotation.data_ptr(),
        out=out.data_ptr(),
        n=rows.shape[0],
        heads=rows.shape[1],
        dim=rows.shape[2],
        row_stride=rows.stride(0),
        head_stride=rows.stride(1),
        eps=eps,
        kind=_KINDS[rows.dtype],
    )
    library.crossdock_norm_rotate(ctypes.byref(arguments))
    return out
