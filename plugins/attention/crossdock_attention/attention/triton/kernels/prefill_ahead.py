"""``prefill_ahead``: prefill on Hopper GPUs for contexts that lie in one piece."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from crossdock_attention.attention.triton.kernels.prefill_parts import can_describe, heads_width

TOKENS = 128
"""Of a tile: keys and values of two of them, and queries of 128 rows, fill the shared memory of a multiprocessor for MLA."""
WARPS = 8
HEAD_DIM = 128
"""Of keys, without their last part, and of values."""
REST_DIMS = (0, 64)


def runs_ahead(q: torch.Tensor, k: torch.Tensor, k_rest: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the kernel takes these: bf16 on a GPU that it is written for, heads of its sizes, rows that descriptors can reach."""
    if not (q.is_cuda and q.dtype is torch.bfloat16 and is_hopper(q.get_device())):
        return False
    fits = k.shape[2] == v.shape[2] == HEAD_DIM and k_rest.shape[2] in REST_DIMS
    whole = all(can_describe(part) for part in (k, k_rest, v))
    return (
        fits and whole and q.data_ptr() % 16 == 0 and q.stride(0) % 8 == 0 and q.stride(1) % 8 == 0 and q.stride(2) == 1
    )


@functools.cache
def is_hopper(device_index: int) -> bool:
    """Compute capability 9, and a Triton that has Gluon."""
    return torch.cuda.get_device_capability(device_index)[0] == 9 and _has_gluon()


def _has_gluon() -> bool:
    try:
        return importlib.util.find_spec("triton.experimental.gluon.language.nvidia.hopper") is not None
    except ModuleNotFoundError:  # of a package on the way
        return False


def prefill_ahead(
    q: torch.Tensor,
    k: torch.Tensor,
    k_rest: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    blocks: torch.Tensor,
    scale: float,
    kv_starts: torch.Tensor,
    rows: int,
) -> None:
    """As ``prefill`` with ``kv_starts``, for what ``runs_ahead`` takes.

    k [L, key heads, D] and k_rest [L, 1 or key heads, R] are the parts of keys of D + R elements, q [N, heads, D + R]; ``rows`` of a block.
    """
    # Imported at the first call: CPU installations have no triton.
    from crossdock_attention.attention.triton.kernels.prefill_ahead_triton import prefill_ahead_kernel

    key_dim, rest_dim, value_dim = k.shape[2], k_rest.shape[2], v.shape[2]
    queries, keys = _described(q, rows, key_dim), _described(k, TOKENS, key_dim)
    launch: Any = prefill_ahead_kernel
    launch[(blocks.shape[0], q.shape[1])](
        queries,
        _described(q, rows, rest_dim) if rest_dim else queries,
        keys,
        _described(k_rest, TOKENS, rest_dim) if rest_dim else keys,
        _described(v, TOKENS, value_dim),
        kv_starts,
        blocks,
        out,
        scale,
        q.stride(1),
        k.stride(1),
        k_rest.stride(1) if k_rest.shape[1] > 1 else 0,
        v.stride(1),
        out.stride()[:2],
        group=q.shape[1] // k.shape[1],
        key_dim=key_dim,
        rest_dim=rest_dim,
        value_dim=value_dim,
        rows=rows,
        tokens=TOKENS,
        num_warps=WARPS,
    )


def _described(heads: torch.Tensor, rows: int, columns: int) -> Any:
    """Copies tiles of [rows, columns] of [rows, heads, dim] into shared memory, laid out for the tensor cores."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    shape, strides = [heads.shape[0], heads_width(heads)], [heads.stride(0), 1]
    return TensorDescriptor(heads, shape, strides, [rows, columns], _tile_layout(rows, columns))


@functools.cache
def _tile_layout(rows: int, columns: int) -> Any:
    from triton.experimental.gluon import language as gl

    layout: Any = gl.NVMMASharedLayout
    return layout.get_default_for([rows, columns], gl.bfloat16)
