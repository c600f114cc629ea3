"""Products with float32 matrices that are multiplied again and again, by the C kernel of ``cpu/packed_linear.c``: for one row and for thousands.

A row's bits do not depend on the rows beside it, nor on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from concurrent.futures import ThreadPoolExecutor

import torch

from crossdock.native_code import native_code

WORK_A_THREAD = 1 << 18
"""Products of two numbers below which another thread is not worth waking up."""


class _Arguments(ctypes.Structure):
    """``struct packed_linear`` of ``cpu/packed_linear.c``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "packed", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "row_stride", "out_stride", "first_block", "end_block")),
        *((name, ctypes.c_int64) for name in ("groups", "row_group", "out_group")),
    )


def packs(weight: torch.Tensor) -> bool:
    """True when the kernel takes this matrix: float32 on the CPU."""
    return (
        weight.dtype is torch.float32
        and weight.device.type == "cpu"
        and weight.numel() > 0
        and native_code().library is not None
    )


class CpuLinear:
    """``rows @ weight.T + bias``, or several such products side by side.

    The weight is copied into the kernel's own form, the only one that is needed.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """``weight`` [n, k], or [groups, n, k] without a bias; ``bias`` [n]; float32, only where ``packs(weight)``."""
        library = native_code().library
        assert library is not None, "packs() was asked first"
        self._function = library.crossdock_packed_linear
        self._function.argtypes = [ctypes.POINTER(_Arguments)]
        self._groups = weight.shape[0] if weight.dim() == 3 else 1
        self._outputs, self._columns = weight.shape[-2:]
        sizes = (ctypes.c_int64(self._outputs), ctypes.c_int64(self._columns))
        library.crossdock_packed_floats.restype = ctypes.c_int64
        library.crossdock_packed_outputs.restype = ctypes.c_int64
        self._blocks = -(-self._outputs // int(library.crossdock_packed_outputs()))
        self._packed = torch.empty(self._groups, int(library.crossdock_packed_floats(*sizes)))
        self._bias = None if bias is None else bias.contiguous()
        plain = weight.contiguous().view(self._groups, -1)
        for one, packed in zip(plain, self._packed, strict=True):
            addresses = (ctypes.c_void_p(one.data_ptr()), ctypes.c_void_p(packed.data_ptr()))
            if library.crossdock_pack_weight(*addresses, *sizes):
                raise MemoryError(f"linear: no memory to pack a weight of {self._outputs} x {self._columns}")

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[m, k] float32 -> [m, n] float32, new; with groups [m, groups, k] -> [m, groups, n]. Rows may lie at any distance.

        Raises:
            ValueError: rows of another width or dtype.
        """
        lead = (self._groups,) if rows.dim() == 3 else ()
        self._check(rows, (*lead, self._columns))
        out = torch.empty((rows.shape[0], *lead, self._outputs))
        self.write(rows, out)
        return out

    def write(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """The same into ``out``, whose rows and groups may lie at any distance; shapes are the caller's to check."""
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        work = rows.shape[0] * self._outputs * self._columns * self._groups
        threads = min(torch.get_num_threads(), self._blocks, max(work // WORK_A_THREAD, 1))
        bounds = [self._blocks * share // threads for share in range(threads + 1)]
        others = [
            _pool(threads - 1).submit(self._run, rows, out, low, high) for low, high in itertools.pairwise(bounds[1:])
        ]
        self._run(rows, out, bounds[0], bounds[1])
        for other in others:
            other.result()

    def _check(self, rows: torch.Tensor, width: tuple[int, ...]) -> None:
        if rows.dtype is not torch.float32 or rows.shape[1:] != width:
            raise ValueError(
                f"linear: rows {tuple(rows.shape)} {rows.dtype}, the weight takes [n, {', '.join(map(str, width))}] "
                f"{torch.float32}"
            )

    def _run(self, rows: torch.Tensor, out: torch.Tensor, first_block: int, end_block: int) -> None:
        """The outputs of some blocks of weights; ctypes lets other Python threads run meanwhile."""
        has_groups = rows.dim() == 3
        arguments = _Arguments(
            rows=rows.data_ptr(),
            packed=self._packed.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            out=out.data_ptr(),
            m=rows.shape[0],
            n=self._outputs,
            k=self._columns,
            row_stride=rows.stride(0),
            out_stride=out.stride(0),
            first_block=first_block,
            end_block=end_block,
            groups=self._groups,
            row_group=rows.stride(1) if has_groups else 0,
            out_group=out.stride(1) if has_groups else 0,
        )
        if self._function(ctypes.byref(arguments)):
            raise MemoryError(f"linear: no memory for {rows.shape[0]} rows of {self._outputs}")


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="crossdock-linear")
