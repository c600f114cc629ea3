# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""``paged_decode``: one query row a sequence over the paged cache, one launch, nothing read from the host."""

from __future__ import annotations

import attrs
import torch
from crossdock.ops.early_launch import early_launch
from crossdock.ops.tile_size import block_of

MULTIPROCESSORS = 132
"""Of an H100 or H200."""
MAX_SPLITS = 32
"""More take longer to merge than they save: one row of 4096 tokens 14 us with 64, 11 us with 32."""
MERGE_UNROLL = 4
"""Splits whose results are loaded together by the program that merges."""


@attrs.frozen(kw_only=True)
class DecodeTile:
    """Cached rows that a program takes at once, and how."""

    tokens: int
    warps: int
    stages: int
    split_blocks: int = 1
    """Blocks of that many tokens that a split has at least, where the context is long enough."""
    programs: int = 4
    """How many should share a multiprocessor; contexts are split until there are as many."""
    latent_heads: int = 16
    """Heads of MLA that a program attends with, at most. 16 are the rows of the smallest product."""


GQA_TILE = DecodeTile(tokens=64, warps=4, stages=2)
LATENT_TILE = DecodeTile(tokens=32, warps=4, stages=2, split_blocks=2, programs=2)
"""For MLA, whose rows are several times longer, as are the results to be merged: two programs fill the registers of a multiprocessor (H200, 16 heads:
256 rows of 192 tokens 29 us in one piece, 38 us in two; 32 rows of 4096 tokens 67 us in 8, 79 us in 16)."""
WIDE_LATENT_TILE = DecodeTile(tokens=64, warps=8, stages=2, split_blocks=2, programs=1, latent_heads=64)
"""Where there are heads and rows enough for one program a multiprocessor: cached rows are read by a quarter of the programs (H200, 128 heads: 128 rows
of 1044 tokens 193 us, in groups of 16 heads 398; 32 rows of 4096 tokens 177 and 345; 8 rows of 1044 tokens 41 and **32**)."""
WIDE_PROGRAMS = 48
"""So many, for half of the multiprocessors nearly, before contexts are split."""


@attrs.frozen(kw_only=True, eq=False)
class NewRows:
    """The step's own keys and values, which are not in the cache yet: row i belongs to sequence i, as its last token."""

    k: torch.Tensor
    """[B, key heads, D], rows and heads at any distance."""
    v: torch.Tensor | None
    """[B, key heads, Dv]; None for MLA."""
    slots: torch.Tensor
    """[B] int64: where they go."""


def choose_splits(num_rows: int, key_heads: int, longest: int, tile: DecodeTile) -> int:
    """Pieces of each context: enough programs to fill the device, at least one block each. A power of two."""
    filling = tile.programs * MULTIPROCESSORS // max(1, num_rows * key_heads)
    wanted = min(max(1, filling), -(-max(1, longest) // tile.tokens), MAX_SPLITS)
    return 1 << (wanted.bit_length() - 1)


def latent_group(num_heads: int, tile: DecodeTile) -> int:
    """Heads of MLA that a program attends with: equal groups."""
    return max(group for group in range(1, tile.latent_heads + 1) if num_heads % group == 0)


@attrs.frozen(kw_only=True)
class DecodeHeads:
    """Heads of a rank, by which a batch gets its tile."""

    num_heads: int
    key_heads: int
    is_latent: bool
    """MLA: all heads share one of keys."""
    element_bytes: int

    def tile(self, num_rows: int) -> DecodeTile:
        """For so many rows. Wide ones of four-byte elements would not fit into a multiprocessor's shared memory."""
        if not self.is_latent:
            return GQA_TILE
        heads = WIDE_LATENT_TILE.latent_heads
        is_wide = self.element_bytes == 2 and self.num_heads % heads == 0
        return WIDE_LATENT_TILE if is_wide and num_rows * self.num_heads // heads >= WIDE_PROGRAMS else LATENT_TILE

    def groups(self, tile: DecodeTile) -> int:
        """Programs of a row before contexts are split."""
        return self.num_heads // latent_group(self.num_heads, tile) if self.is_latent else self.key_heads


def paged_decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor | None,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    splits: int,
    *,
    q_rest: torch.Tensor | None = None,
    new: NewRows | None = None,
    arrivals: torch.Tensor | None = None,
    tile: DecodeTile | None = None,
) -> torch.Tensor:
    """q [B, heads, D], k_pool [pages, page_tokens, key heads, D], v_pool [.., .., key heads, Dv] -> [B, heads, Dv].

    MLA: one key head, ``v_pool`` None; the query's last part comes apart as ``q_rest`` [B, heads, rope], cached rows are [D + rope], Dv = D.
    page_table [B, columns] int32, seq_lens [B] int32 on the device, the step's own row included; a row of length 0 gives zeros, reads nothing
    and stores nothing. With ``new`` the last token of each sequence is taken from there and put into the cache, else it is in the cache.
    arrivals [B * ``DecodeHeads.groups``] int32 zeros, zero again afterwards; needed for more than one split. tile: of ``DecodeHeads.tile``.
    """
    # Imported at the first call: CPU installations have no triton.
    from crossdock_attention.attention.triton.kernels.paged_decode_triton import paged_decode_kernel

    (num_rows, num_heads, key_dim), is_latent = q.shape, v_pool is None
    tile = tile or (LATENT_TILE if is_latent else GQA_TILE)
    # MLA: each group of heads is a key head of its own, all in the same place.
    group = latent_group(num_heads, tile) if is_latent else num_heads // k_pool.shape[2]
    rest_dim, rest = (0, q) if q_rest is None else (q_rest.shape[2], q_rest)
    value_dim, values = (key_dim, k_pool) if v_pool is None else (v_pool.shape[3], v_pool)
    out = torch.empty(num_rows, num_heads, value_dim, dtype=q.dtype, device=q.device)
    if num_rows == 0:
        return out
    parts = (num_rows, num_heads, splits) if splits > 1 else (0, 0, 0)
    partial, sums = (q.new_empty(shape, dtype=torch.float32) for shape in ((*parts, value_dim), (2, *parts)))
    new_keys = k_pool if new is None else new.k
    new_values = new_keys if new is None or new.v is None else new.v
    paged_decode_kernel[(num_rows, num_heads // group, splits)](
        q,
        rest,
        k_pool,
        values,
        new_keys,
        new_values,
        seq_lens if new is None else new.slots,
        page_table,
        seq_lens,
        out,
        partial,
        sums[0],
        sums[1],
        seq_lens if arrivals is None else arrivals,
        page_table.shape[1],
        scale,
        q.stride()[:2],
        rest.stride()[:2],
        _strides(k_pool, 1, is_latent),
        values.stride()[1:3],
        _strides(new_keys, 0, is_latent),
        new_values.stride()[:2],
        page_tokens=k_pool.shape[1],
        group=group,
        group_block=_block(group),
        key_dim=key_dim,
        key_block=_block(key_dim),
        rest_dim=rest_dim,
        rest_block=_block(rest_dim),
        value_dim=value_dim,
        value_block=_block(value_dim),
        value_is_key=is_latent,
        has_new=new is not None,
        splits=splits,
        block=tile.tokens,
        split_blocks=tile.split_blocks,
        merge_unroll=min(MERGE_UNROLL, splits),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **early_launch(q),
    )
    return out


def _strides(tensor: torch.Tensor, dim: int, is_shared: bool) -> tuple[int, int]:
    """From row to row and from head to head; all heads are in one place where they share it."""
    return tensor.stride(dim), 0 if is_shared else tensor.stride(dim + 1)


def _block(dim: int) -> int:
    """The tile of a dimension; products take none below 16."""
    return max(16, block_of(dim))
