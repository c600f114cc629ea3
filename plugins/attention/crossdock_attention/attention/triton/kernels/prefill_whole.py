# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""``prefill_whole``: prefill of blocks whose context ends on a tile, by warps that fetch and warps that compute."""

from __future__ import annotations

import torch

from crossdock_attention.attention.triton.kernels.prefill import can_describe, described_heads, key_parts

QUERY_ROWS = 128
"""Query rows a program takes, half of them by each group of warps that computes."""

TILE_TOKENS = 128
"""Tokens of the context that a program takes at once."""
STAGES = 2
WARPS = 4
"""Of one group; the compiler adds a second computing group and one that fetches."""


def prefill_whole(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    blocks: torch.Tensor,
    scale: float,
    *,
    tokens: int,
    page_table: torch.Tensor | None = None,
    kv_starts: torch.Tensor | None = None,
    page_tokens: int = 1,
    k_rest: torch.Tensor | None = None,
    stages: int = 2,
) -> None:
    """As ``prefill``, for blocks whose first position and rows add up to a multiple of ``tokens``; see ``can_take``."""
    if blocks.shape[0] == 0:
        return
    # Imported at the first call: CPU installations have no triton.
    import triton

    from crossdock_attention.attention.triton.kernels.prefill_whole_triton import prefill_whole_kernel

    k, k_rest = key_parts(k, k_rest)
    key_dim, rest_dim, value_dim = k.shape[2], k_rest.shape[2], v.shape[2]
    table = page_table if page_table is not None else kv_starts
    # For the descriptors that the kernel makes.
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=q.device))
    prefill_whole_kernel[(blocks.shape[0], q.shape[1])](
        described_heads(k, tokens, key_dim),
        described_heads(k_rest, tokens, rest_dim) if rest_dim else k,
        described_heads(v, tokens, value_dim),
        q,
        table,
        kv_starts if kv_starts is not None else table,
        blocks,
        out,
        q.shape[0],
        0 if page_table is None else page_table.shape[1],
        scale,
        q.stride(0),
        q.stride(1),
        k.stride(1),
        k_rest.stride(1) if k_rest.shape[1] > 1 else 0,
        v.stride(1),
        out.stride(0),
        out.stride(1),
        page_tokens=page_tokens,
        paged=page_table is not None,
        group=q.shape[1] // k.shape[1],
        key_dim=key_dim,
        rest_dim=rest_dim,
        value_dim=value_dim,
        rows_block=QUERY_ROWS,
        tokens_block=tokens,
        num_warps=WARPS,
        num_stages=stages,
    )


def can_take(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_rest: torch.Tensor | None = None) -> bool:
    """Whether the heads can come through descriptors, and are of a size that the kernel has registers for."""
    k, k_rest = key_parts(k, k_rest)
    fits = k.shape[2] in (64, 128) and k_rest.shape[2] in (0, 64) and v.shape[2] in (64, 128)
    aligned = q.data_ptr() % 16 == 0 and q.stride(0) * q.element_size() % 16 == 0 and q.stride(2) == 1
    return fits and aligned and all(can_describe(part) for part in (k, k_rest, v))
