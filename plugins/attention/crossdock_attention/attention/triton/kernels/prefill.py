# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""``prefill``: rows of sequences with several query rows against their contexts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

QUERY_ROWS = 128
"""Query rows a program takes."""
CONTEXT_TOKENS = 64


def query_blocks(
    spans: Sequence[tuple[int, int, int, int]], block_rows: int = QUERY_ROWS
) -> list[tuple[int, int, int, int]]:
    """(sequence, first row, rows, prefix) of each sequence -> (sequence, first row, rows, first position) of each block.

    Last blocks of a sequence first: they see the longest context, and starting long work early evens out the end.
    """
    blocks = []
    for sequence, first, rows, prefix in spans:
        for start in range(0, rows, block_rows):
            blocks.append((sequence, first + start, min(block_rows, rows - start), prefix + start))
    return sorted(blocks, key=lambda block: -block[3])


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    blocks: torch.Tensor,
    scale: float,
    *,
    page_table: torch.Tensor | None = None,
    kv_starts: torch.Tensor | None = None,
    page_tokens: int = 1,
    block_rows: int = QUERY_ROWS,
) -> None:
    """q [N, heads, D] -> out [N, heads, Dv], rows named in ``blocks`` [M, 4] int32 only (see ``query_blocks``).

    Paged: k [slots, key heads, D], v [slots, key heads, Dv], page_table [B, columns] int32. Packed: kv_starts [B] int32, the first row of each
    sequence's context in k and v.
    """
    if blocks.shape[0] == 0:
        return
    # Imported at the first call: CPU installations have no triton.
    import triton

    from crossdock_attention.attention.triton.kernels.prefill_triton import prefill_kernel

    _, num_heads, query_dim = q.shape
    # A head size between powers of two is cut in two parts rather than padded: 192 is 128 + 64.
    key_dim = query_dim if query_dim & (query_dim - 1) == 0 else 1 << (query_dim.bit_length() - 1)
    rest_dim = query_dim - key_dim
    value_dim = v.shape[2]
    table = page_table if page_table is not None else kv_starts
    prefill_kernel[(blocks.shape[0], num_heads)](
        q,
        k,
        v,
        table,
        kv_starts if kv_starts is not None else table,
        blocks,
        out,
        0 if page_table is None else page_table.shape[1],
        scale,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        out.stride(0),
        out.stride(1),
        page_tokens=page_tokens,
        paged=page_table is not None,
        group=num_heads // k.shape[1],
        key_dim=key_dim,
        key_block=max(16, key_dim),
        rest_dim=rest_dim,
        rest_block=max(16, triton.next_power_of_2(rest_dim)) if rest_dim else 16,
        value_dim=value_dim,
        value_block=max(16, triton.next_power_of_2(value_dim)),
        rows_block=block_rows,
        tokens_block=CONTEXT_TOKENS,
        num_warps=8 if block_rows >= 128 else 4,
        num_stages=2,
    )
