# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""``paged_decode``: one query row a sequence over the paged cache, two launches, nothing read from the host."""

from __future__ import annotations

import torch

DECODE_BLOCK = 64
"""Cached rows a program takes at once."""
LATENT_BLOCK = 32
"""The same for MLA, whose rows are several times longer."""
TARGET_PROGRAMS = 264
"""Two a multiprocessor of an H100 or H200."""
MAX_SPLITS = 64


def choose_splits(num_rows: int, key_heads: int, longest: int, block: int) -> int:
    """Pieces of each context: enough programs to fill the device, at least one block each. A power of two."""
    wanted = min(max(1, TARGET_PROGRAMS // max(1, num_rows * key_heads)), -(-max(1, longest) // block), MAX_SPLITS)
    return 1 << (wanted.bit_length() - 1)


def paged_decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor | None,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    splits: int,
    rope_dim: int = 0,
) -> torch.Tensor:
    """q [B, heads, D], k_pool [pages, page_tokens, key heads, D], v_pool [.., .., key heads, Dv] -> [B, heads, Dv].

    MLA: one key head, ``v_pool`` None: the value is the key without its last ``rope_dim`` elements, Dv = D - rope_dim.
    page_table [B, columns] int32, seq_lens [B] int32 on the device; a row of length 0 gives zeros and reads nothing.
    """
    # Imported at the first call: CPU installations have no triton.
    import triton

    from crossdock_attention.attention.triton.kernels.paged_decode_triton import (
        merge_splits_kernel,
        paged_decode_kernel,
    )

    num_rows, num_heads, query_dim = q.shape
    _, page_tokens, key_heads, _ = k_pool.shape
    key_dim = query_dim - rope_dim
    value_dim = key_dim if v_pool is None else v_pool.shape[3]
    values = k_pool if v_pool is None else v_pool
    out = torch.empty(num_rows, num_heads, value_dim, dtype=q.dtype, device=q.device)
    if num_rows == 0:
        return out
    group = num_heads // key_heads
    partial = torch.empty(num_rows, num_heads, splits, value_dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(2, num_rows, num_heads, splits, dtype=torch.float32, device=q.device)
    block = DECODE_BLOCK if v_pool is not None else LATENT_BLOCK
    paged_decode_kernel[(num_rows, key_heads, splits)](
        q,
        k_pool,
        values,
        page_table,
        seq_lens,
        partial,
        sums[0],
        sums[1],
        page_table.shape[1],
        scale,
        q.stride(0),
        q.stride(1),
        k_pool.stride(1),
        k_pool.stride(2),
        values.stride(1),
        values.stride(2),
        page_tokens=page_tokens,
        group=group,
        group_block=max(16, triton.next_power_of_2(group)),
        key_dim=key_dim,
        key_block=max(16, triton.next_power_of_2(key_dim)),
        rope_dim=rope_dim,
        rope_block=max(16, triton.next_power_of_2(rope_dim)) if rope_dim else 16,
        value_dim=value_dim,
        value_block=max(16, triton.next_power_of_2(value_dim)),
        value_is_key=v_pool is None,
        splits=splits,
        block=block,
        num_warps=4 if value_dim <= 256 else 8,
        num_stages=2,
    )
    merge_splits_kernel[(num_rows * num_heads,)](
        partial,
        sums[0],
        sums[1],
        out,
        value_dim=value_dim,
        value_block=triton.next_power_of_2(value_dim),
        splits=splits,
        splits_block=triton.next_power_of_2(splits),
        num_warps=4,
    )
    return out
