# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""``prefill``: rows of sequences with several query rows against their contexts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from crossdock_attention.attention.triton.kernels.prefill_ahead import prefill_ahead, runs_ahead
from crossdock_attention.attention.triton.kernels.prefill_parts import can_describe, heads_width, key_parts


@attrs.frozen(kw_only=True)
class PrefillTile:
    """Query rows that a program takes, and how it walks over the context."""

    rows: int
    tokens: int
    warps: int
    stages: int
    registers: int | None = None
    """Most of a thread, to have room for a second program beside the first; None leaves it to the compiler."""
    is_ahead: bool = False
    """``prefill_ahead`` takes its place where it can, in the same blocks of rows."""


GQA_PREFILL = PrefillTile(rows=128, tokens=64, warps=8, stages=2, registers=128)
"""Two programs share a multiprocessor, so that one multiplies while the other is at its softmax. H200, 4 x 4096 tokens, 32 heads of 128, repeated for
half a second: 446 TFLOP/s, against 437 with tiles of 64 x 64, which read keys and values twice as often; all of Qwen3-30B's prefill 1.2 % faster."""
MLA_PREFILL = PrefillTile(rows=128, tokens=64, warps=8, stages=3, is_ahead=True)
"""Keys of 192 leave no room for two. H200, repeated for half a second: 4 x 4096 tokens, 16 heads 430 TFLOP/s, and 473 where ``prefill_ahead`` takes its
place; 8 x 2048, 128 heads 378 and 426. For heads of 128 working ahead gains 1 % over two programs that take turns (458 and 452), so it is not chosen."""


NARROWEST = 32
"""Heads for the products of a group of four warps. Narrower ones (12 and 10) ended in an illegal access on an H200 in bf16 (Triton 3.6), three runs of
three, and not in float32, which does not use those products. With the products of single warps four of four runs were right."""
NARROW_WARPS = 2
SHARED_BYTES = 225_000
"""Of a multiprocessor of an H100 or H200, 227 KiB, without what a kernel needs beside its tiles."""


def query_blocks(spans: Sequence[tuple[int, int, int, int]], block_rows: int) -> list[tuple[int, int, int, int]]:
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
    k_rest: torch.Tensor | None = None,
    tile: PrefillTile,
) -> None:
    """q [N, heads, D] -> out [N, heads, Dv], rows named in ``blocks`` [M, 4] int32 only: ``query_blocks`` of ``tile.rows``.

    Paged: k [slots, key heads, D], v [slots, key heads, Dv], page_table [B, columns] int32. Packed: kv_starts [B] int32, the first row of each
    sequence's context in k and v. Rows and heads of q, k and v may be further apart than they are long.

    MLA: ``k_rest`` [rows, 1, rope] is the last part of the keys of every head, and k [rows, heads, D - rope] what is before it.
    """
    if blocks.shape[0] == 0:
        return
    # Imported at the first call: CPU installations have no triton.
    import triton

    from crossdock_attention.attention.triton.kernels.prefill_triton import prefill_kernel

    _, num_heads, query_dim = q.shape
    k, k_rest = key_parts(k, k_rest)
    if tile.is_ahead and kv_starts is not None and runs_ahead(q, k, k_rest, v):
        prefill_ahead(q, k, k_rest, v, out, blocks, scale, kv_starts, tile.rows)
        return
    key_dim, rest_dim = k.shape[2], query_dim - k.shape[2]
    value_dim = v.shape[2]
    rest_block = max(16, triton.next_power_of_2(rest_dim)) if rest_dim else 16
    is_narrow = q.element_size() == 2 and min(key_dim, value_dim) < NARROWEST
    described = page_table is None or page_tokens % tile.tokens == 0
    described = described and all(can_describe(part) for part in (k, k_rest, v))
    table = page_table if page_table is not None else kv_starts
    prefill_kernel[(blocks.shape[0], num_heads)](
        q,
        described_heads(k, tile.tokens, key_dim) if described else k,
        described_heads(k_rest, tile.tokens, rest_dim) if described and rest_dim else k_rest,
        described_heads(v, tile.tokens, value_dim) if described else v,
        table,
        kv_starts if kv_starts is not None else table,
        blocks,
        out,
        0 if page_table is None else page_table.shape[1],
        scale,
        q.stride()[:2],
        k.stride()[:2],
        (k_rest.stride(0), k_rest.stride(1) if k_rest.shape[1] > 1 else 0),
        v.stride()[:2],
        out.stride()[:2],
        page_tokens=page_tokens,
        paged=page_table is not None,
        described=described,
        group=num_heads // k.shape[1],
        key_dim=key_dim,
        key_block=max(16, key_dim),
        rest_dim=rest_dim,
        rest_block=rest_block,
        value_dim=value_dim,
        value_block=max(16, triton.next_power_of_2(value_dim)),
        rows_block=tile.rows,
        tokens_block=tile.tokens,
        num_warps=NARROW_WARPS if is_narrow else tile.warps,
        num_stages=stages_that_fit(tile, query_dim, value_dim, q.element_size()),
        # Products of float32 run outside the tensor cores and need what they need.
        maxnreg=None if is_narrow or q.element_size() > 2 else tile.registers,
    )


def stages_that_fit(tile: PrefillTile, query_dim: int, value_dim: int, element_bytes: int) -> int:
    """As many as the tile says, fewer where queries, and keys and values of every stage, would not fit into shared memory."""
    queries = tile.rows * query_dim * element_bytes
    stage = tile.tokens * (query_dim + value_dim) * element_bytes
    return max(1, min(tile.stages, (SHARED_BYTES - queries) // stage))


def described_heads(heads: torch.Tensor, tokens: int, columns: int) -> Any:
    """Loads tiles of [tokens, columns] of [rows, heads, dim]; a head begins at its number times the stride between heads."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(heads, [heads.shape[0], heads_width(heads)], [heads.stride(0), 1], [tokens, columns])
