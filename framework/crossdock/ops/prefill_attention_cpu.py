"""Causal attention of a sequence's new rows by the C kernel of ``cpu/prefill_attention.c``."""

from __future__ import annotations

import ctypes

import torch

from crossdock.native_code import native_code

_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_DIM_STEP = 32
"""Head dimensions must be multiples of what the widest vector unit takes at once."""


class _Arguments(ctypes.Structure):
    """``struct prefill_attention`` of ``cpu/prefill_attention.c``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "prefix", "heads", "kv_heads", "key_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("query_stride", "query_head_stride", "key_stride", "key_head_stride")),
        *((name, ctypes.c_int64) for name in ("value_stride", "value_head_stride")),
        ("scale", ctypes.c_float),
        ("kind", ctypes.c_int32),
    )


def takes(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """True when the kernel can attend these rows: one thread, on the CPU, one dtype, dimensions that fit its steps."""
    return (
        queries.dtype in _KINDS
        and queries.dtype is keys.dtype is values.dtype
        and not queries.is_cuda
        and keys.shape[2] % _DIM_STEP == 0
        and values.shape[2] % _DIM_STEP == 0
        and queries.stride(2) == keys.stride(2) == values.stride(2) == 1
        and torch.get_num_threads() == 1
        and native_code().library is not None
    )


def prefill_attention_cpu(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Row i of n sees keys 0 to prefix + i; only where ``takes``.

    Args:
        queries: [n, heads, d], rows and heads at any distance.
        keys: [prefix + n, kv_heads, d], the same; ``heads`` is a multiple of ``kv_heads``.
        values: [prefix + n, kv_heads, dv], the same.
        scale: of the scores.

    Returns:
        [n, heads, dv], new, in the dtype of ``queries``; computed in float32.

    Raises:
        MemoryError: no scratch memory for the keys and values of a head.
    """
    library = native_code().library
    assert library is not None, "takes() was asked first"
    rows, heads, key_dim = queries.shape
    out = queries.new_empty(rows, heads, values.shape[2])
    arguments = _Arguments(
        queries=queries.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        out=out.data_ptr(),
        rows=rows,
        prefix=keys.shape[0] - rows,
        heads=heads,
        kv_heads=keys.shape[1],
        key_dim=key_dim,
        value_dim=values.shape[2],
        query_stride=queries.stride(0),
        query_head_stride=queries.stride(1),
        key_stride=keys.stride(0),
        key_head_stride=keys.stride(1),
        value_stride=values.stride(0),
        value_head_stride=values.stride(1),
        scale=scale,
        kind=_KINDS[queries.dtype],
    )
    if library.crossdock_prefill_attention(ctypes.byref(arguments)):
        raise MemoryError(f"prefill attention: no memory for {keys.shape[0]} keys of a head")
    return out
