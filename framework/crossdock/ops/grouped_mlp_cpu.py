"""Grouped SwiGLU experts by the C kernel: the weights are read where they lie, nothing is prepared or copied."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from crossdock.native_code import native_code

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2}
_STEP = 32
"""Widths must be multiples of this: one step of the widest kernel."""
_ROWS_A_THREAD = 2
"""Fewer chosen pairs than this a thread are not worth waking one up."""


_POINTERS = ("rows", "ids", "weights", "gate_up", "down", "gate_up_scale", "down_scale", "out")
_SIZES = (
    *("num_rows", "row_stride", "ids_stride", "weights_stride", "top_k"),
    *("hidden", "intermediate", "first_expert", "end_expert"),
)
_FLAGS = ("kind", "rows_are_bf16", "row_invariant")


class _Arguments(ctypes.Structure):
    """``struct grouped_mlp`` of ``cpu/grouped_mlp.c``, in its order."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_int32) for name in _FLAGS),
    )


def unsupported_reason(tensors: Mapping[str, torch.Tensor]) -> str:
    """Why the kernel cannot run these tensors here; empty when it can."""
    gate_up = tensors["gate_up"]
    hidden_size, intermediate_size = tensors["down"].shape[1:]
    if gate_up.device.type != "cpu":
        return f"the tensors are on {gate_up.device}"
    if gate_up.dtype not in _KINDS:
        return f"there is no kernel for {gate_up.dtype}"
    if hidden_size % _STEP or intermediate_size % _STEP:
        return f"sizes {hidden_size} and {intermediate_size} are no multiples of {_STEP}"
    if not all(tensor.is_contiguous() for tensor in tensors.values()):
        return "the tensors are not contiguous"
    code = native_code()
    return "" if code.library is not None else code.reason


class GroupedMlpKernel:
    """The kernel bound to one layer's tensors, by address: they may be overwritten in place, never moved."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, row_invariant: bool = False) -> None:
        """With ``row_invariant`` a row's bits do not depend on the rows beside it: sums in one order, and always as many shares."""
        reason = unsupported_reason(tensors)
        library = native_code().library
        if reason or library is None:
            raise ValueError(f"grouped_mlp: {reason}; run it in torch operators")
        self._function = library.crossdock_grouped_mlp
        self._function.argtypes = [ctypes.POINTER(_Arguments)]
        self._tensors = dict(tensors)
        self._row_invariant = row_invariant
        self._num_experts = tensors["down"].shape[0]

    def run(self, rows: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See ``crossdock.ops.grouped_mlp.GroupedMlp.run``. With several torch threads each takes a share of the experts; shares are added in order."""
        if rows.stride(-1) != 1 or rows.dtype not in (torch.float32, torch.bfloat16):
            rows = rows.to(torch.float32).contiguous()
        local_ids = local_ids if local_ids.stride(-1) == 1 else local_ids.contiguous()
        weights = weights if weights.stride(-1) == 1 else weights.contiguous()
        threads = min(torch.get_num_threads(), self._num_experts)
        if not self._row_invariant:
            threads = min(threads, max(local_ids.numel() // _ROWS_A_THREAD, 1))
        if threads == 1:
            return self._share(rows, local_ids, weights, 0, self._num_experts)
        bounds = [self._num_experts * share // threads for share in range(threads + 1)]
        others = [
            _pool(threads - 1).submit(self._share, rows, local_ids, weights, low, high)
            for low, high in itertools.pairwise(bounds[1:])
        ]
        total = self._share(rows, local_ids, weights, bounds[0], bounds[1])
        for other in others:
            total += other.result()
        return total

    def _share(
        self, rows: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor, first: int, end: int
    ) -> torch.Tensor:
        """[R, H] float32, the sum over experts ``first`` to ``end - 1``; ctypes lets other Python threads run meanwhile."""
        tensors = self._tensors
        num_rows, hidden_size = rows.shape
        out = torch.empty((num_rows, hidden_size), dtype=torch.float32)
        gate_up_scale, down_scale = tensors.get("gate_up_scale"), tensors.get("down_scale")
        arguments = _Arguments(
            rows=rows.data_ptr(),
            ids=local_ids.data_ptr(),
            weights=weights.data_ptr(),
            gate_up=tensors["gate_up"].data_ptr(),
            down=tensors["down"].data_ptr(),
            gate_up_scale=None if gate_up_scale is None else gate_up_scale.data_ptr(),
            down_scale=None if down_scale is None else down_scale.data_ptr(),
            out=out.data_ptr(),
            num_rows=num_rows,
            row_stride=rows.stride(0),
            ids_stride=local_ids.stride(0),
            weights_stride=weights.stride(0),
            top_k=local_ids.shape[1],
            hidden=hidden_size,
            intermediate=tensors["down"].shape[2],
            first_expert=first,
            end_expert=end,
            kind=_KINDS[tensors["gate_up"].dtype],
            rows_are_bf16=rows.dtype is torch.bfloat16,
            row_invariant=self._row_invariant,
        )
        if self._function(ctypes.byref(arguments)):
            raise MemoryError(f"grouped_mlp: no memory for {num_rows} rows of {hidden_size}")
        return out


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Kept for the life of the process: making one costs more than a decode step's experts."""
    return ThreadPoolExecutor(threads, thread_name_prefix="grouped-mlp")
