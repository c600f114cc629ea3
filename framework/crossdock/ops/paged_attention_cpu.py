"""Decode attention over pages by the C kernel of ``cpu/paged_attention.c``."""

from __future__ import annotations

import ctypes

import torch

from crossdock.native_code import native_code

_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_DIM_STEPS = {torch.float32: 16, torch.bfloat16: 32}
"""Head dimensions must be multiples of what the widest vector unit reads at once."""
_TOKEN_STEP = 4
"""Tokens whose scores are taken together; they lie in one page."""
MOST_THREADS = 2
"""The kernel uses one thread. With two, torch's gather and fused attention still take longer than it does alone."""


class _Arguments(ctypes.Structure):
    """``struct paged_attention`` of ``cpu/paged_attention.c``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values", "out", "pages", "lengths")),
        *(
            (name, ctypes.c_int64)
            for name in ("batch", "heads", "kv_heads", "key_dim", "value_dim", "page_tokens", "max_pages")
        ),
        *((name, ctypes.c_int64) for name in ("query_stride", "key_stride", "value_stride", "value_head_stride")),
        ("scale", ctypes.c_float),
        ("kind", ctypes.c_int32),
    )


def serves(
    dtype: torch.dtype,
    device: torch.device,
    *,
    key_dim: int,
    value_dim: int,
    page_tokens: int,
    most_threads: int = MOST_THREADS,
) -> bool:
    """True when the kernel can run for a cache of these sizes on this machine. With more than ``most_threads`` torch is left to it."""
    return (
        dtype in _KINDS
        and device.type == "cpu"
        and key_dim % _DIM_STEPS[dtype] == 0
        and value_dim % _DIM_STEPS[dtype] == 0
        and page_tokens % _TOKEN_STEP == 0
        and torch.get_num_threads() <= most_threads
        and native_code().library is not None
    )


def paged_attention_cpu(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One query row a sequence against all its tokens; only where ``serves``.

    Args:
        queries: [b, heads, d], heads contiguous.
        keys: pool [pages, page_tokens, kv_heads, d], contiguous.
        values: pool [pages, page_tokens, kv_heads, dv], or a narrower view of the keys' pool (latent attention).
        pages: [b, max_pages] int32, contiguous; ids inside the pools are the caller's to check.
        lengths: [b] int64 tokens of each sequence, all at least 1.
        scale: of the scores.

    Returns:
        [b, heads, dv], new, in the dtype of ``queries``.

    Raises:
        MemoryError: no scratch memory.
    """
    library = native_code().library
    assert library is not None, "serves() was asked first"
    batch, heads, key_dim = queries.shape
    out = queries.new_empty(batch, heads, values.shape[3])
    arguments = _Arguments(
        queries=queries.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        out=out.data_ptr(),
        pages=pages.data_ptr(),
        lengths=lengths.data_ptr(),
        batch=batch,
        heads=heads,
        kv_heads=keys.shape[2],
        key_dim=key_dim,
        value_dim=values.shape[3],
        page_tokens=keys.shape[1],
        max_pages=pages.shape[1],
        query_stride=queries.stride(0),
        key_stride=keys.stride(1),
        value_stride=values.stride(1),
        value_head_stride=values.stride(2),
        scale=scale,
        kind=_KINDS[queries.dtype],
    )
    if library.crossdock_paged_attention(ctypes.byref(arguments)):
        raise MemoryError(f"paged attention: no memory for the scratch of {heads} heads")
    return out
